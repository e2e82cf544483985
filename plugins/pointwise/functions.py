"""The elementwise functions: name -> numpy. `plugins/cpu/functions.h` has the same names for kernels.

Comes in: nothing. Goes out: `UNARY`, `BINARY`, `ELEMENTWISE`; `TRUTHS`, whose values say yes or no; `FUNCTIONS`, all of
them. Must not know: who uses them.
Callers that want the truth give float64 and round the result. A truth is 1 or 0; any other number but 0 counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) of a large -x: the quotient is 0, as it should be
        return 1 / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _where(condition: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    return np.where(condition != 0, yes, no)


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
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,  # halves to even
    "sign": np.sign,
    "log1p": np.log1p,
    "expm1": np.expm1,
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

#: The names of both.
ELEMENTWISE = frozenset(UNARY) | frozenset(BINARY)

#: Functions whose value is a truth.
TRUTHS: dict[str, Callable[..., np.ndarray]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
}

#: Every function, and how many operands it takes.
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    **UNARY,
    **BINARY,
    **TRUTHS,
    "where": _where,
}
ARITY = {name: 1 if name in UNARY or name == "logical_not" else 3 if name == "where" else 2 for name in FUNCTIONS}
