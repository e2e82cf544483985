"""select_rows: the rows of x that an index names: the tokens whose logits are wanted.

Comes in: x and row numbers that the runtime has checked. Goes out: those rows. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """None: rows are copied as they are."""


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X f32[T,H], rows i32[S] -> f32[S,H]."""
    match types:
        case [TensorType(dtype="f32", shape=(_, int())), TensorType(dtype="i32", shape=(_,))]:
            return (TensorType("f32", (types[1].shape[0], types[0].shape[1])),)
    raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x f32[T,H] and rows i32[S]")


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """x[rows]."""
    x, rows = inputs
    return (x[rows],)


OPERATOR = Operator("select_rows", Attrs, infer, reference, rtol=0, atol=0)
