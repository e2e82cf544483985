"""Contractions: `reduce` over one axis and `matmul`. The axis that is summed over is always a number, never T or S.

Comes in: f32 tensors. Goes out: `OPERATORS`. Must not know: kernels, the plug-in that `reduce` is lowered to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.builder.primitives.elementwise import NoAttrs, broadcast_dims
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class ReduceAttrs:
    """`kind` mean, sum or max; `axis` may be negative; `keepdim` leaves a 1 in its place."""

    kind: str
    axis: int
    keepdim: bool


_KINDS: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "sum": np.sum, "max": np.max}


def _infer_reduce(attrs: ReduceAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    (x,) = types
    if attrs.kind not in _KINDS:
        raise ValueError(f"kind {attrs.kind!r} is not one of {', '.join(_KINDS)}")
    if x.dtype != "f32" or not -x.rank <= attrs.axis < x.rank:
        raise ValueError(f"axis {attrs.axis} of {x}: expected f32 and an axis that exists")
    axis = attrs.axis % x.rank
    if isinstance(x.shape[axis], str):
        raise ValueError(f"{x} is reduced over its symbolic axis {axis}: that would mix tokens")
    return (TensorType("f32", (*x.shape[:axis], *([1] if attrs.keepdim else []), *x.shape[axis + 1 :])),)


def _reduce(context: StepContext, attrs: ReduceAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Summed in float64."""
    value = _KINDS[attrs.kind](inputs[0].astype(np.float64), axis=attrs.axis, keepdims=attrs.keepdim)
    return (np.asarray(value, np.float32),)


def _infer_matmul(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """a [..,M,K], b [..,K,N] -> [..,M,N]; what stands before broadcasts."""
    a, b = types
    if a.rank < 2 or b.rank < 2 or {a.dtype, b.dtype} != {"f32"}:
        raise ValueError(f"{a} and {b}: expected f32 matrices")
    if a.shape[-1] != b.shape[-2] or isinstance(a.shape[-1], str):
        raise ValueError(f"{a} times {b}: {a.shape[-1]} columns against {b.shape[-2]} rows, both must be one number")
    return (TensorType("f32", (*broadcast_dims(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])),)


def _matmul(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (np.matmul(inputs[0], inputs[1], dtype=np.float32),)


OPERATORS = (
    Operator("reduce", ReduceAttrs, _infer_reduce, _reduce),
    Operator("matmul", NoAttrs, _infer_matmul, _matmul),
)
