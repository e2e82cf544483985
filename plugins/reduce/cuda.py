"""How the cuda targets call reduce. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.rows import block_of, row_count, row_stride, warps_of
from llmc.plugins.reduce import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each row."""
    (x,), (y,) = inputs, outputs
    width = int(x.shape[-1])
    block = block_of(width)
    call = CudaCall(
        kernel="reduce.kernels:reduce",
        args={
            "x": Pointer("in", 0),
            "y": Pointer("out", 0),
            "x_stride": row_stride("in", 0, x),
            "y_stride": row_stride("out", 0, y) if attrs.keepdim else 1,
        },
        constexprs={"KIND": attrs.kind, "WIDTH": width, "BLOCK": block},
        grid=((row_count(x),),),
        num_warps=warps_of(block),
    )
    return (call,)
