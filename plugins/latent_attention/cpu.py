"""How the cpu target calls latent_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import C_TYPES, CpuCall, KernelEnv, Literal, Pointer, Scratch
from llmc.plugins.latent_attention import Attrs

#: What the kernel is written for: multiples of its 16 lanes that divide its partitions of 256 positions.
BLOCK_SIZES = (16, 32, 64, 128, 256)
KV_DTYPES = ("f32", "bf16")
_PARTITION, _TILE_ROWS, _LANES = 256, 32, 16


def layer_bytes(latent: int, rope: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: rows [block_size][latent + rope], whatever the number of heads."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    return (latent + rope) * block_size * NUMPY_DTYPES[kv_dtype].itemsize


def scratch_bytes(latent: int, rope: int, max_context: int) -> int:
    """`LatentAttention::scratch_bytes` of cpu.h, for each thread (a test compares them)."""
    width = -(-latent // _LANES) * _LANES
    depth = -(-(latent + rope) // _LANES) * _LANES
    stride = width + _LANES
    parts = -(-max_context // _PARTITION)
    own = _TILE_ROWS * (latent + rope + _PARTITION + 2 * stride) + depth * _LANES + _LANES * 4
    return 4 * (own + _TILE_ROWS * stride * parts)


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Needs `env.kv_offsets[layer]`, `env.max_context`; raises ValueError for a block size the kernel has not."""
    a = attrs
    layer_bytes(a.latent, a.rope, env.block_size, env.kv_dtype)
    shape = f"{a.heads}, {a.latent}, {a.rope}, {env.block_size}, {C_TYPES[env.kv_dtype]}"
    return CpuCall(
        header="plugins/latent_attention/cpu.h",
        function=f"latent_attention<{shape}>",
        args=(
            Pointer("in", 0),
            Pointer("in", 1),
            Pointer("out", 0),
            Literal(f"{float(a.scale)!r}f"),
            Literal(str(env.kv_offsets[a.layer])),
            Literal(str(env.kv_block_bytes)),
        ),
        scratch=Scratch(per_thread=scratch_bytes(a.latent, a.rope, env.max_context)),
    )
