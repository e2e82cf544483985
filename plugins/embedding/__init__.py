"""embedding: the rows of a table that ids name, as f32.

Comes in: ids that the runtime has checked to be rows of the table. Goes out: rows. Must not know: builder, runtime.
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
    """Ids i32[..], table f32|bf16[V,H] -> f32[..,H]."""
    match types:
        case [TensorType(dtype="i32"), TensorType(dtype="f32" | "bf16", shape=(int(), int()))]:
            return (TensorType("f32", (*types[0].shape, types[1].shape[1])),)
    raise ValueError(f"inputs are {', '.join(map(str, types))}; expected ids i32[..] and a table f32 or bf16 [V,H]")


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """table[ids]."""
    ids, table = inputs
    return (table[ids].astype(np.float32),)


OPERATOR = Operator("embedding", Attrs, infer, reference, rtol=0, atol=0)
