"""How the cpu target calls causal_conv. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.causal_conv import Attrs
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Literal, Pointer, RowStride


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x may have rows that lie apart. Needs `env.state_offsets[state]`."""
    silu = str(attrs.activation == "silu").lower()
    return CpuCall(
        header="plugins/causal_conv/cpu.h",
        function=f"causal_conv<{attrs.channels}, {attrs.taps}, {silu}>",
        args=(
            Pointer("in", 0),
            RowStride("in", 0),
            Pointer("in", 1),
            Pointer("in", 2) if attrs.bias else Literal("nullptr"),
            Pointer("out", 0),
            *env.state_place(attrs.state),
        ),
        strided=frozenset({Pointer("in", 0)}),
    )
