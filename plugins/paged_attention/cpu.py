"""How the cpu target calls paged_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import C_TYPES, CpuCall, KernelEnv, Literal, Pointer, Scratch
from llmc.plugins.paged_attention import Attrs

#: What the kernel is written for: multiples of its 16 lanes that divide its partitions of 256 positions.
BLOCK_SIZES = (16, 32, 64, 128, 256)
KV_DTYPES = ("f32", "bf16")
_PARTITION, _TILE_ROWS, _LANES = 256, 24, 16


def layer_bytes(kv_heads: int, head_dim: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: K [kv_heads][head_dim][block_size], then V [kv_heads][block_size][head_dim]."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    return 2 * kv_heads * head_dim * block_size * NUMPY_DTYPES[kv_dtype].itemsize


def scratch_bytes(heads: int, kv_heads: int, head_dim: int, max_context: int) -> int:
    """`PagedAttention::scratch_bytes` of cpu.h, for each thread (a test compares them)."""
    group = heads // kv_heads
    rows = max(1, _TILE_ROWS // group) * group
    stride = -(-head_dim // _LANES) * _LANES + _LANES
    return 4 * rows * stride * -(-max_context // _PARTITION)


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Needs `env.kv_offsets[layer]`, `env.max_context`; raises ValueError for a block size the kernel has not."""
    layer_bytes(attrs.kv_heads, attrs.head_dim, env.block_size, env.kv_dtype)
    shape = f"{attrs.heads}, {attrs.kv_heads}, {attrs.head_dim}, {env.block_size}, {C_TYPES[env.kv_dtype]}"
    numbers = (attrs.scale, attrs.softcap or 0.0)
    return CpuCall(
        header="plugins/paged_attention/cpu.h",
        function=f"paged_attention<{shape}, {attrs.window or 0}, {str(attrs.softcap is not None).lower()}>",
        args=(
            Pointer("in", 0),
            Pointer("out", 0),
            *(Literal(f"{float(number)!r}f") for number in numbers),
            Literal(str(env.kv_offsets[attrs.layer])),
            Literal(str(env.kv_block_bytes)),
        ),
        scratch=Scratch(per_thread=scratch_bytes(attrs.heads, attrs.kv_heads, attrs.head_dim, env.max_context)),
    )
