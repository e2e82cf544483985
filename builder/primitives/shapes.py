"""Operators that move or rename elements: reshape, transpose, slice, concat, broadcast.

Comes in: tensors of any dtype. Goes out: `OPERATORS`. Must not know: which of them are views on a target.
A shape holds at most one symbol, so that a step's arrays alone say what it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import Dim, TensorType
from llmc.builder.primitives.elementwise import broadcast_dims
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class ShapeAttrs:
    """`shape` of the result: numbers, and T or S."""

    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class TransposeAttrs:
    """Axis i of the result is axis perm[i] of the input."""

    perm: tuple[int, ...]


@dataclass(frozen=True)
class SliceAttrs:
    """Entries start:stop:step of one axis; start and stop are not negative and inside the axis."""

    axis: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True)
class ConcatAttrs:
    """`axis` may be negative."""

    axis: int


def count(shape: Sequence[Dim]) -> tuple[int, Counter[str]]:
    """How many elements: a number, times symbols."""
    return math.prod(d for d in shape if isinstance(d, int)), Counter(d for d in shape if isinstance(d, str))


def _axis(axis: int, x: TensorType) -> int:
    if not -x.rank <= axis < x.rank:
        raise ValueError(f"axis {axis}: {x} has {x.rank}")
    return axis % x.rank


def _static(axis: int, x: TensorType) -> int:
    """The axis, not negative, whose size is a number; raises ValueError for T and S."""
    axis = _axis(axis, x)
    if isinstance(x.shape[axis], str):
        raise ValueError(f"axis {axis} of {x} is symbolic: that would mix tokens")
    return axis


def _infer_reshape(attrs: ShapeAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    (x,) = types
    if count(x.shape) != count(attrs.shape):
        raise ValueError(f"{x} has another number of elements than {list(attrs.shape)}")
    if sum(isinstance(d, str) for d in attrs.shape) > 1:
        raise ValueError(f"{list(attrs.shape)} has more than one symbol")
    return (TensorType(x.dtype, attrs.shape),)


def _reshape(context: StepContext, attrs: ShapeAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (inputs[0].reshape([-1 if isinstance(d, str) else d for d in attrs.shape]),)


def _infer_transpose(attrs: TransposeAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    (x,) = types
    if sorted(attrs.perm) != list(range(x.rank)):
        raise ValueError(f"perm {attrs.perm} is no permutation of the axes of {x}")
    return (TensorType(x.dtype, tuple(x.shape[i] for i in attrs.perm)),)


def _transpose(context: StepContext, attrs: TransposeAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (np.ascontiguousarray(inputs[0].transpose(attrs.perm)),)


def _infer_slice(attrs: SliceAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    (x,) = types
    axis = _static(attrs.axis, x)
    size = x.shape[axis]
    assert isinstance(size, int)
    if not 0 <= attrs.start < attrs.stop <= size or attrs.step < 1:
        raise ValueError(f"{attrs.start}:{attrs.stop}:{attrs.step} is no range of axis {axis} of {x}")
    length = -(-(attrs.stop - attrs.start) // attrs.step)
    return (TensorType(x.dtype, (*x.shape[:axis], length, *x.shape[axis + 1 :])),)


def _slice(context: StepContext, attrs: SliceAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    (x,) = inputs
    index = [slice(None)] * x.ndim
    index[attrs.axis] = slice(attrs.start, attrs.stop, attrs.step)
    return (x[tuple(index)],)


def _infer_concat(attrs: ConcatAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    axis = _static(attrs.axis, types[0])
    total = 0
    for x in types:
        same = x.dtype == types[0].dtype and x.rank == types[0].rank
        if not same or any(a != b for i, (a, b) in enumerate(zip(x.shape, types[0].shape, strict=True)) if i != axis):
            raise ValueError(f"{x} and {types[0]} differ beside axis {axis}")
        size = x.shape[_static(axis, x)]
        assert isinstance(size, int)
        total += size
    return (TensorType(types[0].dtype, (*types[0].shape[:axis], total, *types[0].shape[axis + 1 :])),)


def _concat(context: StepContext, attrs: ConcatAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (np.concatenate(inputs, axis=attrs.axis),)


def _infer_broadcast(attrs: ShapeAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    (x,) = types
    if broadcast_dims(x.shape, attrs.shape) != attrs.shape:
        raise ValueError(f"{x} does not broadcast to {list(attrs.shape)}")
    if any(new == "S" != old for new, old in zip(attrs.shape, _padded(x.shape, len(attrs.shape)), strict=True)):
        raise ValueError(f"{x} to {list(attrs.shape)}: a value that is not one row each cannot become S rows")
    return (TensorType(x.dtype, attrs.shape),)


def _padded(shape: tuple[Dim, ...], rank: int) -> tuple[Dim, ...]:
    return (1,) * (rank - len(shape)) + shape


def _broadcast(context: StepContext, attrs: ShapeAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """T is the tokens of the step, S is what the input has."""
    (x,) = inputs
    sizes = {"T": int(context.query_start[-1])}
    have = _padded(x.shape, len(attrs.shape))
    shape = [sizes.get(d, int(h)) if isinstance(d, str) else d for d, h in zip(attrs.shape, have, strict=True)]
    return (np.ascontiguousarray(np.broadcast_to(x, shape)),)


OPERATORS = (
    Operator("reshape", ShapeAttrs, _infer_reshape, _reshape),
    Operator("transpose", TransposeAttrs, _infer_transpose, _transpose),
    Operator("slice", SliceAttrs, _infer_slice, _slice),
    Operator("concat", ConcatAttrs, _infer_concat, _concat),
    Operator("broadcast", ShapeAttrs, _infer_broadcast, _broadcast),
)
