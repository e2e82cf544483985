"""mean_squares: for each row of several matrices, a rank's part of the mean of all squares, whose sum over ranks is it.

Comes in: this rank's columns of each matrix. Goes out: one number a row and matrix. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """`widths`: how many columns each matrix has over all ranks."""

    widths: tuple[int, ...]


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x_i f32[T,N_i] -> f32[T,i]."""
    fits = all(t.dtype == "f32" and t.rank == 2 and t.shape[0] == types[0].shape[0] for t in types)
    if not fits or not types or len(types) != len(attrs.widths):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {len(attrs.widths)} matrices f32[T,..]")
    if any(not isinstance(t.shape[1], int) or t.shape[1] > w for t, w in zip(types, attrs.widths, strict=True)):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; no wider than {attrs.widths}")
    return (TensorType("f32", (types[0].shape[0], len(types))),)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """In float64."""
    sums = [np.square(x.astype(np.float64)).sum(axis=1) / w for x, w in zip(inputs, attrs.widths, strict=True)]
    return (np.stack(sums, axis=1).astype(np.float32),)


OPERATOR = Operator("mean_squares", Attrs, infer, reference)
