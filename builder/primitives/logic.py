"""Comparisons, and what is made of their results.

Comes in: tensors of one dtype, or bool. Goes out: `OPERATORS`, `COMPARISONS`, `LOGICAL`. Must not know: who decides by
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.builder.primitives.elementwise import NoAttrs, broadcast_dims
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.pointwise.functions import TRUTHS

LOGICAL = ("logical_and", "logical_or")
COMPARISONS = tuple(name for name in TRUTHS if name not in (*LOGICAL, "logical_not"))


def _two(name: str, dtypes: tuple[str, ...]) -> Operator:
    function = TRUTHS[name]

    def infer(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """A, b of one dtype, broadcast -> bool."""
        a, b = types
        if a.dtype != b.dtype or a.dtype not in dtypes:
            raise ValueError(f"{name} of {a} and {b}: expected one dtype, {' or '.join(dtypes)}")
        return (TensorType("bool", broadcast_dims(a.shape, b.shape)),)

    def reference(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        return (np.asarray(function(*inputs)),)

    return Operator(name, NoAttrs, infer, reference, rtol=0, atol=0)


def _infer_not(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """X bool -> bool."""
    if len(types) != 1 or types[0].dtype != "bool":
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected bool")
    return (types[0],)


def _not(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (np.logical_not(inputs[0]),)


def _infer_where(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Condition bool, a, b of one dtype, broadcast -> a where the condition holds, else b."""
    if len(types) != 3 or types[0].dtype != "bool" or types[1].dtype != types[2].dtype:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected bool and two of one dtype")
    shape = broadcast_dims(types[0].shape, broadcast_dims(types[1].shape, types[2].shape))
    return (TensorType(types[1].dtype, shape),)


def _where(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (np.where(*inputs),)


OPERATORS = (
    *(_two(name, ("f32", "i32")) for name in COMPARISONS),
    *(_two(name, ("bool",)) for name in LOGICAL),
    Operator("logical_not", NoAttrs, _infer_not, _not, rtol=0, atol=0),
    Operator("where", NoAttrs, _infer_where, _where, rtol=0, atol=0),
)
