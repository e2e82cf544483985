"""How the cpu target calls latent_cache. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import C_TYPES, Arg, CpuCall, KernelEnv, Literal, Pointer, RowStride
from llmc.plugins.latent_cache import Attrs

_STYLES = {None: "kNone", "half": "kHalf", "interleaved": "kInterleaved"}


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """q, latent, key part, cos and sin may have rows that lie apart."""
    a = attrs
    used = 3 if a.style is None else 5
    pointers: Sequence[Arg] = [Pointer("in", i) for i in range(used)] + [Literal("nullptr")] * (5 - used)
    strides: Sequence[Arg] = [RowStride("in", i) for i in range(used)] + [Literal("0")] * (5 - used)
    weight: Arg = Pointer("in", used) if a.norm_eps is not None else Literal("nullptr")
    width = int(inputs[0].shape[1]) // a.heads
    norm = str(a.norm_eps is not None).lower()
    shape = f"{a.heads}, {a.latent}, {a.rope}, {env.block_size}, llmc::Turn::{_STYLES[a.style]}, {norm}"
    return CpuCall(
        header="plugins/latent_cache/cpu.h",
        function=f"latent_cache<{shape}, {C_TYPES[env.kv_dtype]}>",
        args=(
            *pointers,
            *strides,
            weight,
            Literal(f"{a.norm_eps or 0.0!r}f"),
            Literal(str(width)),
            Literal(str(a.q_start)),
            Pointer("out", 0),
            *env.kv_place(a.layer),
        ),
        strided=frozenset(Pointer("in", i) for i in range(used)),
    )
