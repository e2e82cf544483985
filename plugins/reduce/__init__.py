"""reduce: mean, sum or maximum over the last axis, in one fixed order.

Comes in: a tensor. Goes out: one number a row. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext

KINDS: dict[str, Callable[..., np.ndarray]] = {"mean": np.mean, "sum": np.sum, "max": np.max}


@dataclass(frozen=True)
class Attrs:
    """`kind` mean, sum or max; `axis` the last one; `keepdim` leaves a 1 in its place."""

    kind: str
    axis: int = -1
    keepdim: bool = True


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X f32[..,H] -> f32[..,1], or f32[..]."""
    if attrs.kind not in KINDS:
        raise ValueError(f"kind {attrs.kind!r} is not one of {', '.join(KINDS)}")
    if len(types) != 1 or types[0].dtype != "f32" or not types[0].rank or not isinstance(types[0].shape[-1], int):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected f32[..,H]")
    if attrs.axis not in (-1, types[0].rank - 1):
        raise ValueError(f"axis {attrs.axis} of {types[0]} is not the last")
    return (TensorType("f32", (*types[0].shape[:-1], *([1] if attrs.keepdim else []))),)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Accumulated in float64."""
    wide = inputs[0].astype(np.float64)
    return (np.asarray(KINDS[attrs.kind](wide, axis=-1, keepdims=attrs.keepdim)).astype(np.float32),)


OPERATOR = Operator("reduce", Attrs, infer, reference)
