"""How the cpu target calls layer_norm.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Literal, Pointer, Product, row_stride, strided_rows
from llmc.plugins.layer_norm import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x and residual, where they are matrices, may have a row stride."""
    width = inputs[0].shape[-1]
    null, zero = Literal("nullptr"), Literal("0")
    return CpuCall(
        header="plugins/layer_norm/cpu.h",
        function=f"layer_norm<{width}, {str(attrs.residual).lower()}>",
        args=(
            Product(inputs[0].shape[:-1]),
            Pointer("in", 0),
            row_stride("in", 0, inputs[0]),
            Pointer("in", 1),
            Pointer("in", 2),
            Literal(f"{attrs.eps!r}f"),
            Pointer("in", 3) if attrs.residual else null,
            row_stride("in", 3, inputs[3]) if attrs.residual else zero,
            Pointer("out", 0) if attrs.residual else null,
            Pointer("out", len(outputs) - 1),
        ),
        strided=strided_rows(inputs, but=(1, 2)),
    )
