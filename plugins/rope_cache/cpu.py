"""How the cpu target calls rope_cache. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.blocks import KV_TYPES, head_scales
from llmc.plugins.cpu.call import Call, CpuCall, KernelEnv, Literal, Pointer, RowStride
from llmc.plugins.rope_cache import Attrs

_STYLES = {"half": "llmc::Rotary::kHalf", "interleaved": "llmc::Rotary::kInterleaved"}
_NORMS = {"rms": "llmc::Norm::kRms", "layer": "llmc::Norm::kLayer"}
_SCOPES = {"head": "llmc::NormScope::kHead", "each": "llmc::NormScope::kEach", "all": "llmc::NormScope::kAll"}


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """q, k, v, cos and sin may have rows that lie apart."""
    rows = 3 + 2 * bool(attrs.rotary)
    present = [True] * rows + [False] * (5 - rows)
    present += [attrs.has_norm] * 2 + [attrs.has_norm and attrs.norm_bias] * 2 + [attrs.norm_means]
    numbers = [sum(present[:i]) for i in range(len(present))]  # of each input, were it there
    pointers = [Pointer("in", n) if has else Literal("nullptr") for n, has in zip(numbers, present, strict=True)]
    strides = [RowStride("in", i) for i in range(rows)] + [Literal("0")] * (5 - rows)
    eps = Literal(f"{attrs.qk_norm_eps or 0.0!r}f")
    widths = f"{attrs.heads}, {attrs.kv_heads}, {attrs.head_dim}, {attrs.value_dim}, {attrs.rotary}"
    scales = head_scales(attrs.kv_scales, env.kv_dtype)
    cache = f"{env.block_size}, {KV_TYPES[env.kv_dtype]}, {scales.type}"
    return CpuCall(
        header="plugins/rope_cache/cpu.h",
        function=f"rope_cache<{widths}, {_STYLES[attrs.style]}, {_norming(attrs)}, {cache}>",
        args=(
            Call("llmc::RopeInputs", (*pointers[:5], *strides, *pointers[5:], eps)),
            Pointer("out", 0),
            *env.kv_place(attrs.layer),
            scales,
        ),
        strided=frozenset(Pointer("in", i) for i in range(rows)),
    )


def _norming(a: Attrs) -> str:
    kind = _NORMS[a.norm] if a.has_norm else "llmc::Norm::kNone"
    flags = ", ".join(str(flag).lower() for flag in (a.norm_bias, a.norm_last, a.norm_means))
    return f"llmc::Norming<{kind}, {_SCOPES[a.norm_scope]}, {flags}>"
