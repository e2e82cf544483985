"""Elementwise operators: unary, binary with numpy's broadcasting, and the change of dtype.

Comes in: tensors of any shape. Goes out: `OPERATORS`, `broadcast_dims`. Must not know: which of them get fused.
Their names and values are those of plugins/pointwise, which is what they are fused into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.pointwise.functions import BINARY, UNARY


@dataclass(frozen=True)
class NoAttrs:
    """An operator that has nothing to choose."""


@dataclass(frozen=True)
class CastAttrs:
    """`dtype` of the result; a name of `artifacts.types.NUMPY_DTYPES`."""

    dtype: str


#: What integers have too; the others are f32 only.
_ON_INTEGERS = frozenset({"neg", "abs", "add", "sub", "mul", "maximum", "minimum"})


def broadcast_dims(left: tuple[Dim, ...], right: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """numpy's rule, for shapes with symbols; raises ValueError where two dimensions differ and neither is 1."""
    rank = max(len(left), len(right))
    out: list[Dim] = []
    for a, b in zip((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right, strict=True):
        if a != b and 1 not in (a, b):
            raise ValueError(f"shapes {list(left)} and {list(right)} do not broadcast: {a} against {b}")
        out.append(b if a == 1 else a)
    return tuple(out)


def _check_dtype(name: str, dtype: str) -> None:
    if dtype != "f32" and not (dtype == "i32" and name in _ON_INTEGERS):
        raise ValueError(f"{name} is not defined for {dtype}")


def _unary(name: str) -> Operator:
    function = UNARY[name]

    def infer(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        (x,) = types
        _check_dtype(name, x.dtype)
        return (x,)

    def reference(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """In float64, rounded once: the truth, not another rounding."""
        (x,) = inputs
        with np.errstate(over="ignore", divide="ignore"):
            return (np.asarray(function(x.astype(np.float64))).astype(x.dtype),)

    return Operator(name, NoAttrs, infer, reference)


def _binary(name: str) -> Operator:
    function = BINARY[name]

    def infer(attrs: NoAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        a, b = types
        if a.dtype != b.dtype:
            raise ValueError(f"dtypes {a.dtype} and {b.dtype} differ")
        _check_dtype(name, a.dtype)
        return (TensorType(a.dtype, broadcast_dims(a.shape, b.shape)),)

    def reference(context: StepContext, attrs: NoAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        a, b = inputs
        return (np.asarray(function(a, b), a.dtype),)

    return Operator(name, NoAttrs, infer, reference)


def _infer_cast(attrs: CastAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    (x,) = types
    return (TensorType(attrs.dtype, x.shape),)


def _cast(context: StepContext, attrs: CastAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return (inputs[0].astype(NUMPY_DTYPES[attrs.dtype]),)


OPERATORS = (
    *(_unary(name) for name in UNARY),
    *(_binary(name) for name in BINARY),
    Operator("cast", CastAttrs, _infer_cast, _cast),
)
