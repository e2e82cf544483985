"""How the cpu target calls latent_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.blocks import LANES, PARTITION, partial_floats, value_bytes
from llmc.plugins.cpu.call import C_TYPES, CpuCall, KernelEnv, Literal, Pointer, Scratch
from llmc.plugins.latent_attention import Attrs

_TILE_ROWS = 32


def layer_bytes(latent: int, rope: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: rows [block_size][latent + rope], whatever the number of heads. Raises
    ValueError for FP8: the kernels have no scales for rows that are keys and values at once.
    """
    if kv_dtype == "f8e4m3":
        raise ValueError("the cache of latent attention is f32 or bf16, not fp8; build with --kv-cache-dtype bf16")
    return (latent + rope) * value_bytes(block_size, kv_dtype)


def scratch_bytes(latent: int, rope: int, max_context: int) -> int:
    """`LatentAttention::scratch_bytes` of cpu.h, for each thread (a test compares them)."""
    depth = -(-(latent + rope) // LANES) * LANES
    own = depth * LANES + _TILE_ROWS * (latent + rope + PARTITION) + partial_floats(2 * _TILE_ROWS, latent, 1)
    return 4 * (own + partial_floats(_TILE_ROWS, latent, max_context))


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Needs `env.kv_offsets[layer]`, `env.max_context`; raises ValueError for a block size the kernel has not."""
    a = attrs
    value_bytes(env.block_size, env.kv_dtype)
    shape = f"{a.heads}, {a.latent}, {a.rope}, {env.block_size}, {C_TYPES[env.kv_dtype]}"
    return CpuCall(
        header="plugins/latent_attention/cpu.h",
        function=f"latent_attention<{shape}>",
        args=(
            Pointer("in", 0),
            Pointer("in", 1),
            Pointer("out", 0),
            Literal(f"{float(a.scale)!r}f"),
            *env.kv_place(a.layer),
        ),
        scratch=Scratch(per_thread=scratch_bytes(a.latent, a.rope, env.max_context)),
    )
