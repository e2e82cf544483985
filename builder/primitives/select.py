"""Choosing among the entries of each row: `topk`, `gather` and `scatter` over the last axis.

Comes in: rows of a known length. Goes out: `OPERATORS`. Must not know: what is chosen; kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.builder.primitives.elementwise import NoAttrs
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.rowwise.functions import top


@dataclass(frozen=True)
class TopkAttrs:
    """The `k` largest, or with `largest` False the smallest, of each row."""

    k: int
    largest: bool = True


def _infer_topk(attrs: TopkAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X f32[..,n] -> i32[..,k]: where they stand, best first, of equals the first; NaN counts as the largest."""
    (x,) = types
    if x.dtype != "f32" or not x.rank or not isinstance(x.shape[-1], int) or not 1 <= attrs.k <= x.shape[-1]:
        raise ValueError(f"the {attrs.k} best of {x}: expected rows of f32 that are as long")
    return (TensorType("i32", (*x.shape[:-1], attrs.k)),)


def _topk(context: StepContext, attrs: TopkAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (top(inputs[0], attrs.k, attrs.largest),)


def _infer_gather(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X [..,n], index i32[..,m] within 0..n-1 -> [..,m]."""
    x, index = types
    if index.dtype != "i32" or not x.rank or x.shape[:-1] != index.shape[:-1] or not isinstance(x.shape[-1], int):
        raise ValueError(f"{index} does not index the rows of {x}")
    return (TensorType(x.dtype, index.shape),)


def _gather(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    x, index = inputs
    return (np.take_along_axis(x, index, axis=-1),)


def _infer_scatter(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X [..,n], index i32[..,m], source [..,m] or [] -> x with the source's entries put where the index says."""
    x, index, source = types
    _infer_gather(attrs, [x, index])
    if source.dtype != x.dtype or source.shape not in ((), index.shape):
        raise ValueError(f"{source} cannot be put into {x} by {index}")
    return (x,)


def _scatter(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    x, index, source = inputs
    y = x.copy()
    np.put_along_axis(y, index, np.broadcast_to(source, index.shape), axis=-1)
    return (y,)


OPERATORS = (
    Operator("topk", TopkAttrs, _infer_topk, _topk, rtol=0, atol=0),
    Operator("gather", NoAttrs, _infer_gather, _gather, rtol=0, atol=0),
    Operator("scatter", NoAttrs, _infer_scatter, _scatter, rtol=0, atol=0),
)
