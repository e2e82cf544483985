"""How the cuda targets call quantize. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.rows import power_of_two, row_count, row_stride, warps_of
from llmc.plugins.quantize import Attrs

#: Numbers of a row that a program rounds at once, at most.
_AT_ONCE = 8192


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each row."""
    x, numbers, scales = inputs[0], outputs[0], outputs[1]
    width = int(x.shape[-1])
    block = min(_AT_ONCE, power_of_two(width))
    call = CudaCall(
        kernel="quantize.kernels:quantize_e4m3",
        args={
            "x": Pointer("in", 0),
            "y": Pointer("out", 0),
            "scale": Pointer("out", 1),
            "K": width,
            "x_stride": row_stride("in", 0, x),
            "y_stride": row_stride("out", 0, numbers),
            "scale_stride": row_stride("out", 1, scales),
        },
        constexprs={"STATIC": None if attrs.scale is None else float(attrs.scale), "BLOCK": block},
        grid=((row_count(x),),),
        num_warps=warps_of(block),
    )
    return (call,)
