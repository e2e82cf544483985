"""copy: movement of data that cannot be a view: transpose, slice, concat, broadcast.

Comes in: one tensor, or several for concat. Goes out: a contiguous tensor of the same dtype. Must not know: builder,
runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.plugins.operator import Operator, StepContext

KINDS = ("transpose", "slice", "concat", "broadcast")


@dataclass(frozen=True)
class Attrs:
    """A transpose reads `perm`; a slice `axis`, `start`, `stop`, `step`; a concat `axis`; a broadcast `shape`."""

    kind: str
    perm: tuple[int, ...] = ()
    axis: int = 0
    start: int = 0
    stop: int = 0
    step: int = 1
    shape: tuple[Dim, ...] = ()


def _axis(attrs: Attrs, x: TensorType) -> int:
    if not -x.rank <= attrs.axis < x.rank:
        raise ValueError(f"axis {attrs.axis} of {x} does not exist")
    return attrs.axis % x.rank


def _size(x: TensorType, axis: int) -> int:
    size = x.shape[axis]
    if isinstance(size, str):
        raise ValueError(f"axis {axis} of {x} is symbolic")
    return size


def _sliced(attrs: Attrs, x: TensorType) -> TensorType:
    axis = _axis(attrs, x)
    if not 0 <= attrs.start < attrs.stop <= _size(x, axis) or attrs.step < 1:
        raise ValueError(f"{attrs.start}:{attrs.stop}:{attrs.step} is no range of axis {axis} of {x}")
    length = -(-(attrs.stop - attrs.start) // attrs.step)
    return TensorType(x.dtype, (*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _joined(attrs: Attrs, types: Sequence[TensorType]) -> TensorType:
    axis = _axis(attrs, types[0])
    total = 0
    for t in types:
        if (t.dtype, t.shape[:axis], t.shape[axis + 1 :]) != (
            types[0].dtype,
            types[0].shape[:axis],
            types[0].shape[axis + 1 :],
        ):
            raise ValueError(f"{t} does not join {types[0]} on axis {axis}")
        total += _size(t, axis)
    return TensorType(types[0].dtype, (*types[0].shape[:axis], total, *types[0].shape[axis + 1 :]))


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X [..] -> the moved tensor."""
    if attrs.kind not in KINDS or not types or (len(types) > 1 and attrs.kind != "concat"):
        raise ValueError(f"kind {attrs.kind!r} with {len(types)} inputs is not one of {', '.join(KINDS)}")
    x = types[0]
    if any(NUMPY_DTYPES[t.dtype].itemsize != 4 for t in types):
        raise ValueError(f"{x} has no elements of 4 bytes")
    if attrs.kind == "slice":
        return (_sliced(attrs, x),)
    if attrs.kind == "concat":
        return (_joined(attrs, types),)
    if attrs.kind == "transpose":
        if sorted(attrs.perm) != list(range(x.rank)):
            raise ValueError(f"perm {attrs.perm} is no permutation of the axes of {x}")
        return (TensorType(x.dtype, tuple(x.shape[i] for i in attrs.perm)),)
    lead = len(attrs.shape) - x.rank
    if lead < 0 or any(d not in (1, s) for d, s in zip(x.shape, attrs.shape[lead:], strict=True)):
        raise ValueError(f"{x} does not broadcast to {list(attrs.shape)}")
    return (TensorType(x.dtype, attrs.shape),)


def _concrete(context: StepContext, attrs: Attrs, x: np.ndarray) -> list[int]:
    """The broadcast shape; a symbol is the input's own size, or where that has 1, T (the step's tokens)."""
    own = (1,) * (len(attrs.shape) - x.ndim) + x.shape
    if any(d == "S" and o == 1 for d, o in zip(attrs.shape, own, strict=True)):
        raise ValueError("broadcast of 1 to S: a step does not tell its numpy reference how many rows it wants")
    tokens = int(context.query_start[-1])
    return [
        int(d) if not isinstance(d, str) else o if o != 1 else tokens for d, o in zip(attrs.shape, own, strict=True)
    ]


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """numpy's own movement, made contiguous."""
    x = inputs[0]
    if attrs.kind == "transpose":
        x = x.transpose(attrs.perm)
    elif attrs.kind == "slice":
        axis = attrs.axis % x.ndim
        x = x[(slice(None),) * axis + (slice(attrs.start, attrs.stop, attrs.step),)]
    elif attrs.kind == "concat":
        x = np.concatenate(inputs, axis=attrs.axis)
    else:
        x = np.broadcast_to(x, _concrete(context, attrs, x))
    return (np.ascontiguousarray(x),)


OPERATOR = Operator("copy", Attrs, infer, reference, rtol=0, atol=0)
