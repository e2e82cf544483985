"""How the cuda targets call a norm over the last axis: `rms_norm` and `layer_norm` differ in name and weights only.

Comes in: name, attributes and types. Goes out: `CudaCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import Arg, CudaCall
from llmc.plugins.cuda.rows import block_of, row_count, row_stride, warps_of


def norm_call(
    name: str,
    weights: Sequence[str],
    eps: float,
    residual: bool,
    quantize: float | str | None,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
) -> CudaCall:
    """Inputs are x, vectors that the kernel calls `weights`, and the residual if there is one. Outputs are the sum of
    both, if there is a residual, and its norm; where that is rounded to E4M3 its scales too.
    """
    added, normed = 1 + len(weights), int(residual)
    width = int(inputs[0].shape[-1])
    args: dict[str, Arg] = {
        "x": Pointer("in", 0),
        **{weight: Pointer("in", 1 + i) for i, weight in enumerate(weights)},
        "y": Pointer("out", normed),
        "x_stride": row_stride("in", 0, inputs[0]),
        "y_stride": row_stride("out", normed, outputs[normed]),
        "eps": float(eps),
    }
    if residual:
        args |= {"residual": Pointer("in", added), "residual_stride": row_stride("in", added, inputs[added])}
        args |= {"total": Pointer("out", 0), "total_stride": row_stride("out", 0, outputs[0])}
    if quantize is not None:
        args |= {"scales": Pointer("out", normed + 1)}
        args |= {"scales_stride": row_stride("out", normed + 1, outputs[normed + 1])}
    optional = ("residual", "residual_stride", "total", "total_stride", "scales", "scales_stride")
    block = block_of(width)
    return CudaCall(
        kernel=f"{name}.kernels:{name}",
        args=args,
        constexprs={
            **{name: None for name in optional if name not in args},
            "STATIC": float(quantize) if isinstance(quantize, int | float) else None,
            "WIDTH": width,
            "BLOCK": block,
        },
        grid=((row_count(inputs[0]),),),
        num_warps=warps_of(block),
    )
