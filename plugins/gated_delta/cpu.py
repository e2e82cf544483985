"""How the cpu target calls gated_delta. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Literal, Pointer, RowStride
from llmc.plugins.gated_delta import NORM_EPS, Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Every input may have rows that lie apart. Needs `env.state_offsets[state]`."""
    shape = f"{attrs.heads}, {attrs.key_heads}, {attrs.key_dim}, {attrs.value_dim}"
    flags = f"{str(attrs.normalize).lower()}, {str(attrs.per_key).lower()}"
    return CpuCall(
        header="plugins/gated_delta/cpu.h",
        function=f"gated_delta<{shape}, {flags}>",
        args=(
            *(Pointer("in", i) for i in range(5)),
            *(RowStride("in", i) for i in range(5)),
            Literal(f"{float(attrs.scale)!r}f"),
            Literal(f"{NORM_EPS!r}f"),
            Pointer("out", 0),
            *env.state_place(attrs.state),
        ),
        strided=frozenset(Pointer("in", i) for i in range(5)),
    )
