"""How the cpu target calls mean_squares. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Call, CpuCall, KernelEnv, Literal, Pointer, Product, RowStride, strided_rows
from llmc.plugins.mean_squares import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Rows of the inputs may lie apart."""
    parts = [
        Call(f"llmc::Squares<{x.shape[1]}>", (Pointer("in", i), RowStride("in", i), Literal(f"{float(width)!r}f")))
        for i, (x, width) in enumerate(zip(inputs, attrs.widths, strict=True))
    ]
    return CpuCall(
        header="plugins/mean_squares/cpu.h",
        function="mean_squares",
        args=(Product(inputs[0].shape[:1]), Pointer("out", 0), *parts),
        strided=strided_rows(inputs),
    )
