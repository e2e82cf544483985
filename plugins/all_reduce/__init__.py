"""all_reduce: the sum of a partial result over the ranks, added in rank order, so that all ranks hold the same bits.

Comes in: each rank's partial. Goes out: the sum, on every rank. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """None: what is summed is the whole input."""


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[M,N] -> f32[M,N]."""
    if len(types) != 1 or types[0].dtype != "f32":
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected one f32 tensor")
    return (types[0],)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The context's own `all_reduce`; with one rank the input itself."""
    return (context.all_reduce(inputs[0]) if context.tp > 1 else inputs[0],)


OPERATOR = Operator("all_reduce", Attrs, infer, reference)
