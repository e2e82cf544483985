"""How the cuda targets call copy. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.copy import Attrs
from llmc.plugins.cpu.call import RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.move import Stride, move, strides_of


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A concat takes a launch for each input. Raises UnsupportedError for more than four axes, and where an axis but
    the first is symbolic.
    """
    y = outputs[0]
    if y.rank == 1 and isinstance(y.shape[0], str):  # a number for each token: rows of one column
        y, inputs = _column(y), [_column(x) for x in inputs]
    to = strides_of("out", 0, y)
    if attrs.kind == "concat":
        return _concat(attrs, inputs, y, to)
    x = inputs[0]
    strides, first = strides_of("in", 0, x), 0
    if attrs.kind == "transpose":
        strides = [strides[axis] for axis in attrs.perm]
    elif attrs.kind == "broadcast":
        lead = y.rank - x.rank
        own: tuple[Dim, ...] = (*(1,) * lead, *x.shape)
        strides = [0 if d == 1 else s for d, s in zip(own, [*[0] * lead, *strides], strict=True)]
    else:
        return (_slice(attrs, x, y, strides, to),)
    return (move(0, y.shape, strides, to, first),)


def _column(x: TensorType) -> TensorType:
    return TensorType(x.dtype, (*x.shape, 1))


def _slice(attrs: Attrs, x: TensorType, y: TensorType, strides: list[Stride], to: Sequence[Stride]) -> CudaCall:
    axis = attrs.axis % x.rank
    step = strides[axis]
    if isinstance(step, RowStride):  # of a matrix of known size, which is a weight or constant: its rows are dense
        step = int(x.shape[-1])
    strides[axis] = step * attrs.step
    return move(0, y.shape, strides, to, step * attrs.start)


def _concat(attrs: Attrs, inputs: Sequence[TensorType], y: TensorType, to: Sequence[Stride]) -> tuple[CudaCall, ...]:
    axis, at = attrs.axis % y.rank, 0
    step = prod(int(d) for d in y.shape[axis + 1 :])  # of an axis that is joined, so of known size: it is dense
    to = [step if own == axis else stride for own, stride in enumerate(to)]
    calls = []
    for index, x in enumerate(inputs):
        calls.append(move(index, x.shape, strides_of("in", index, x), to, 0, step * at))
        at += int(x.shape[axis])
    return tuple(calls)
