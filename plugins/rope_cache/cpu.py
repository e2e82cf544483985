"""How the cpu target calls rope_cache. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import C_TYPES, Arg, CpuCall, KernelEnv, Literal, Pointer, RowStride
from llmc.plugins.rope_cache import Attrs

_STYLES = {"half": "llmc::Rotary::kHalf", "interleaved": "llmc::Rotary::kInterleaved"}


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """q, k, v, cos and sin may have rows that lie apart."""
    norm = attrs.qk_norm_eps is not None
    used = 3 + 2 * bool(attrs.rotary)
    pointers: Sequence[Arg] = [Pointer("in", i) for i in range(used)] + [Literal("nullptr")] * (5 - used)
    strides: Sequence[Arg] = [RowStride("in", i) for i in range(used)] + [Literal("0")] * (5 - used)
    weights: Sequence[Arg] = [Pointer("in", used), Pointer("in", used + 1)] if norm else [Literal("nullptr")] * 2
    eps = Literal(f"{attrs.qk_norm_eps if norm else 0.0!r}f")
    place = [Literal(str(env.kv_offsets[attrs.layer])), Literal(str(env.kv_block_bytes))]
    shape = f"{attrs.heads}, {attrs.kv_heads}, {attrs.head_dim}, {attrs.rotary}, {_STYLES[attrs.style]}"
    return CpuCall(
        header="plugins/rope_cache/cpu.h",
        function=f"rope_cache<{shape}, {str(norm).lower()}, {env.block_size}, {C_TYPES[env.kv_dtype]}>",
        args=(*pointers, *strides, *weights, eps, Pointer("out", 0), *place),
        strided=frozenset(Pointer("in", i) for i in range(used)),
    )
