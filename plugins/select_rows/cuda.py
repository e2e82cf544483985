"""How the cuda targets call select_rows. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Product
from llmc.plugins.cuda.rows import power_of_two, warps_of
from llmc.plugins.select_rows import Attrs

#: Columns of one program, at most.
_COLUMNS = 1024


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each row and piece of columns."""
    width = int(inputs[0].shape[1])
    block = min(_COLUMNS, power_of_two(width))
    call = CudaCall(
        kernel="select_rows.kernels:select_rows",
        args={
            "x": Pointer("in", 0),
            "rows": Pointer("in", 1),
            "y": Pointer("out", 0),
            "x_stride": RowStride("in", 0),
            "y_stride": RowStride("out", 0),
        },
        constexprs={"WIDTH": width, "BLOCK": block},
        grid=((Product(inputs[1].shape),), (Product((width,), block),)),
        num_warps=warps_of(block),
    )
    return (call,)
