"""How the cuda targets call embedding. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Product
from llmc.plugins.cuda.rows import block_of, row_stride, warps_of
from llmc.plugins.embedding import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each id."""
    rows, width = (int(d) for d in inputs[1].shape)
    block = block_of(width)
    call = CudaCall(
        kernel="embedding.kernels:embedding",
        args={
            "ids": Pointer("in", 0),
            "table": Pointer("in", 1),
            "y": Pointer("out", 0),
            "rows": rows,
            "y_stride": row_stride("out", 0, outputs[0]),
        },
        constexprs={"WIDTH": width, "BLOCK": block},
        grid=((Product(inputs[0].shape),),),
        num_warps=warps_of(block),
    )
    return (call,)
