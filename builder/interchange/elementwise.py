"""Elementwise functions in ONNX's operators. Comes in: a formula of `pointwise`, operands. Goes out: the result's name.
Must not know: where formulas come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmc.builder.interchange.emitter import Emitter
from llmc.plugins.pointwise import visit

_NAMES = {
    "neg": "Neg", "exp": "Exp", "log": "Log", "tanh": "Tanh", "cos": "Cos", "sin": "Sin", "sqrt": "Sqrt",
    "sigmoid": "Sigmoid", "relu": "Relu", "erf": "Erf", "abs": "Abs", "floor": "Floor", "ceil": "Ceil",
    "round": "Round", "sign": "Sign", "reciprocal": "Reciprocal", "add": "Add", "sub": "Sub", "mul": "Mul",
    "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min",
}  # fmt: skip
_COMPARE = {"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal"}
_LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_not": "Not"}
_COMPOSED: dict[str, Callable[[Emitter, str], str]] = {
    "rsqrt": lambda e, x: e.op("Reciprocal", e.op("Sqrt", x)),
    "silu": lambda e, x: e.op("Mul", x, e.op("Sigmoid", x)),
    "square": lambda e, x: e.op("Mul", x, x),
    "gelu": lambda e, x: e.op("Gelu", x),
    "gelu_tanh": lambda e, x: e.op("Gelu", x, approximate="tanh"),
    "log1p": lambda e, x: e.op("Log", e.op("Add", x, e.constant(1.0, "f32"))),
    "expm1": lambda e, x: e.op("Sub", e.op("Exp", x), e.constant(1.0, "f32")),
}


def apply(e: Emitter, name: str, *operands: str) -> str:
    """A function of f32 operands; a truth is 1 or 0 in f32. Raises ValueError for a function without translation."""
    if name in _NAMES:
        return e.op(_NAMES[name], *operands)
    if name in _COMPOSED:
        return _COMPOSED[name](e, *operands)
    if name in _COMPARE:
        return e.cast(e.op(_COMPARE[name], *operands), "f32")
    if name == "ne":
        return e.cast(e.op("Not", e.op("Equal", *operands)), "f32")
    if name in _LOGIC:
        return e.cast(e.op(_LOGIC[name], *(e.cast(x, "bool") for x in operands)), "f32")
    if name == "where":
        condition, yes, no = operands
        return e.op("Where", e.cast(condition, "bool"), yes, no)
    raise ValueError(f"the function {name} has no ONNX operator")


def formula(e: Emitter, expr: str, operands: Sequence[str]) -> str:
    """A formula of f32 operands i0, i1, ..."""
    number = lambda value: e.constant(value, "f32")  # noqa: E731
    return str(visit(expr, lambda i: operands[i], number, lambda name, *inner: apply(e, name, *map(str, inner))))
