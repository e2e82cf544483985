"""Elementwise operators: unary, binary with numpy's broadcasting, and the change of dtype.

Comes in: tensors of any shape. Goes out: `OPERATORS`, `broadcast_dims`. Must not know: which of them get fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class NoAttrs:
    """An operator that has nothing to choose."""


@dataclass(frozen=True)
class CastAttrs:
    """`dtype` of the result; a name of `artifacts.types.NUMPY_DTYPES`."""

    dtype: str


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


#: Computed in float64 and rounded to float32, so that these are the truth and not another rounding.
UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "cos": np.cos,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "erf": _erf,
    "abs": np.abs,
    "square": np.square,
    "reciprocal": lambda x: 1 / x,
}

BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
}

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
        (x,) = inputs
        with np.errstate(over="ignore", divide="ignore"):  # exp(-x) of a large -x: the quotient is 0, as it should be
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
