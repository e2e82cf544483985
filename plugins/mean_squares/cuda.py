"""How the cuda targets call mean_squares. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.rows import block_of, row_count, warps_of
from llmc.plugins.mean_squares import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A launch for each matrix."""
    return tuple(_column(i, x, total) for i, (x, total) in enumerate(zip(inputs, attrs.widths, strict=True)))


def _column(index: int, x: TensorType, total: int) -> CudaCall:
    width = int(x.shape[-1])
    block = block_of(width)
    return CudaCall(
        kernel="mean_squares.kernels:mean_squares",
        args={
            "x": Pointer("in", index),
            "y": Pointer("out", 0),
            "x_stride": RowStride("in", index),
            "y_stride": RowStride("out", 0),
            "total": float(total),
        },
        constexprs={"COLUMN": index, "WIDTH": width, "BLOCK": block},
        grid=((row_count(x),),),
        num_warps=warps_of(block),
    )
