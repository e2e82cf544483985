"""How the cuda targets move elements that are no view: the launch that `copy` and others share.

Comes in: types, strides. Goes out: `CudaCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.cpu.call import Pointer, RowStride, Side
from llmc.plugins.cuda.call import CudaCall, Product
from llmc.plugins.cuda.rows import power_of_two, warps_of

#: Axes that the kernel knows.
MAX_RANK = 4
#: Columns of one program, at most.
_COLUMNS = 1024

Stride = RowStride | int


def strides_of(side: Side, index: int, kind: TensorType) -> list[Stride]:
    """Elements between entries of each axis. Raises UnsupportedError where an axis but the first is symbolic."""
    if any(isinstance(d, str) for d in kind.shape[1:]):
        raise UnsupportedError(f"a copy with {kind}, which has a symbolic axis that is not its first")
    strides: list[Stride] = [prod(int(d) for d in kind.shape[axis + 1 :]) for axis in range(kind.rank)]
    if kind.rank == 2:
        strides[0] = RowStride(side, index)
    return strides


def move(
    source: int,
    shape: Sequence[Dim],
    x_strides: Sequence[Stride],
    y_strides: Sequence[Stride],
    x_first: Stride = 0,
    y_first: Stride = 0,
) -> CudaCall:
    """Input `source` to output 0, `shape` of it; strides are those of that shape's axes.

    Raises UnsupportedError for more axes than the kernel knows.
    """
    if len(shape) > MAX_RANK:
        raise UnsupportedError(f"a copy of {list(shape)}: the cuda targets move tensors of at most {MAX_RANK} axes")
    dims = _four(shape, 1)
    x0, x1, x2, x3 = _four(x_strides, 0)
    y0, y1, y2, _ = _four(y_strides, 0)
    width = int(dims[3]) if shape else 1
    block = min(_COLUMNS, power_of_two(width))
    return CudaCall(
        kernel="copy.kernels:move",
        args={
            "x": Pointer("in", source), "y": Pointer("out", 0), "x0": x0, "x1": x1, "x2": x2, "x3": x3,
            "y0": y0, "y1": y1, "y2": y2, "x_first": x_first, "y_first": y_first,
        },
        constexprs={"ROWS1": dims[1], "ROWS2": dims[2], "WIDTH": width, "BLOCK": block},
        grid=((Product(tuple(dims[:3])),), (Product((width,), block),)),
        num_warps=warps_of(block),
    )  # fmt: skip


def _four(axes: Sequence[Any], none: int) -> list[Any]:
    """What is given for the axes of a tensor, for four: the first, which may be symbolic, stays the first."""
    head, tail = (axes[:1], axes[1:]) if len(axes) > 1 else ((), axes)
    return [*head, *[none] * (MAX_RANK - len(axes)), *tail]
