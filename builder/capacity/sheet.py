"""Arithmetic that can be shown: named quantities, each given with its source or derived by a formula from others.

Comes in: numbers and formulas as text. Goes out: values, and each formula with its numbers. Must not know: what the
quantities mean. What is printed is what was computed, because the text itself is evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_BINARY: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max, "floor": math.floor, "ceil": math.ceil}
#: Units that are written with a prefix, and the step from one prefix to the next.
_PREFIXED = ("B", "B/s", "FLOP", "FLOP/s")


@dataclass(frozen=True)
class Quantity:
    """`formula` in the names of other quantities, with their numbers `shown`; or None where the value is given, and
    `note` says by whom. `unit`: B, B/s, FLOP, FLOP/s, s, a word, or nothing.
    """

    name: str
    value: float
    unit: str
    note: str
    formula: str | None = None
    shown: str | None = None

    def explain(self) -> str:
        """One line: name, formula, numbers, value, meaning."""
        steps = [self.name, self.formula, self.shown, formatted(self.value, self.unit)]
        return f"{' = '.join(step for step in steps if step)}  # {self.note}"


class Sheet:
    """Quantities by name, in the order in which they came."""

    def __init__(self) -> None:
        self.quantities: dict[str, Quantity] = {}

    def __getitem__(self, name: str) -> float:
        return self.quantities[name].value

    def give(self, name: str, value: float, unit: str, note: str) -> float:
        """A quantity that comes from elsewhere."""
        return self._add(Quantity(name, value, unit, note))

    def derive(self, name: str, formula: str, unit: str, note: str) -> float:
        """A quantity by a formula of + - * /, min, max, floor, ceil, numbers and names that the sheet has. A division
        by 0 is infinite. Raises ValueError for any other formula, KeyError for an unknown name.
        """
        value = self._evaluate(ast.parse(formula, mode="eval").body)
        return self._add(Quantity(name, value, unit, note, formula, self._with_numbers(formula)))

    def _add(self, quantity: Quantity) -> float:
        if quantity.name in self.quantities:
            raise ValueError(f"{quantity.name} is in the sheet already")
        self.quantities[quantity.name] = quantity
        return quantity.value

    def _evaluate(self, node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.Name):
            return self[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = self._evaluate(node.left), self._evaluate(node.right)
            if isinstance(node.op, ast.Div) and right == 0:
                return math.inf
            return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            values = [self._evaluate(argument) for argument in node.args]
            unbounded = node.func.id in ("floor", "ceil") and not math.isfinite(values[0])
            return values[0] if unbounded else _FUNCTIONS[node.func.id](*values)
        raise ValueError(f"{ast.unparse(node)!r} is no part of a formula")

    def _with_numbers(self, formula: str) -> str:
        def number(match: re.Match[str]) -> str:
            found = self.quantities.get(match[0])
            return formatted(found.value, found.unit) if found else match[0]

        return re.sub(r"[A-Za-z_]\w*", number, formula)


def formatted(value: float, unit: str) -> str:
    """A number for people, with its unit: `3.35 TB/s`, `1,024 tokens`, `7.2 ms`."""
    if not math.isfinite(value):
        return "unbounded"
    if unit == "s":
        return _seconds(value)
    if unit == "B" and abs(value) < 1e6:
        return f"{value:,.0f} B"
    if unit in _PREFIXED:
        power = min(int(math.log10(abs(value)) // 3), 5) if abs(value) >= 1 else 0
        return f"{value / 1000**power:.4g} {['', 'k', 'M', 'G', 'T', 'P'][power]}{unit}"
    text = f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _seconds(value: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} us"
