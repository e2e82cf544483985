"""How the cpu target calls a norm over the last axis: `rms_norm` and `layer_norm` differ in name and weights only.

Comes in: name, attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, Literal, Pointer, Product, row_stride, strided_rows


def norm_call(
    name: str, weights: int, eps: float, residual: bool, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> CpuCall:
    """Inputs are x, `weights` vectors, and the residual if there is one; x and residual, where they are matrices, may
    have a row stride. Outputs are the sum of both, if there is a residual, and its norm.
    """
    added = 1 + weights
    return CpuCall(
        header=f"plugins/{name}/cpu.h",
        function=f"{name}<{inputs[0].shape[-1]}, {str(residual).lower()}>",
        args=(
            Product(inputs[0].shape[:-1]),
            Pointer("in", 0),
            row_stride("in", 0, inputs[0]),
            *(Pointer("in", 1 + i) for i in range(weights)),
            Literal(f"{eps!r}f"),
            Pointer("in", added) if residual else Literal("nullptr"),
            row_stride("in", added, inputs[added]) if residual else Literal("0"),
            Pointer("out", 0) if residual else Literal("nullptr"),
            Pointer("out", len(outputs) - 1),
        ),
        strided=strided_rows(inputs, but=range(1, added)),
    )
