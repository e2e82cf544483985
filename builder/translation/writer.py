"""A writer of another graph's values. Comes in: values of that graph. Goes out: values of it. Must not know: llmc's
operators, whose graph is written.

A writer says how ITS graph expresses an elementary operation; what is composed of several stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.pointwise import visit

Value = TypeVar("Value")


class GraphWriter(ABC, Generic[Value]):
    """`types` has every value of llmc's graph by its name. `tp`: ranks.

    Operands of elementwise functions are f32. A method raises ValueError for what its graph has no form of.
    """

    def __init__(self, types: Mapping[str, TensorType], tp: int) -> None:
        self.types, self.tp = types, tp

    @abstractmethod
    def value(self, name: str) -> Value:
        """A value of llmc's graph."""

    @abstractmethod
    def number(self, value: float, rank: int) -> Value:
        """f32 that broadcasts over a value of that rank."""

    @abstractmethod
    def cast(self, x: Value, dtype: str) -> Value:
        """The same numbers in another dtype of llmc's."""

    @abstractmethod
    def elementary(self, name: str, *operands: Value) -> Value:
        """A function of plugins/pointwise that the graph has an operation for. Operands broadcast as in numpy."""

    @abstractmethod
    def mean(self, x: Value) -> Value:
        """Over the last axis, which stays as 1."""

    @abstractmethod
    def gather(self, table: Value, rows: Value) -> Value:
        """Rows of a table: its first axis gives way to those of `rows`."""

    @abstractmethod
    def last_columns(self, x: Value, start: int, stop: int) -> Value:
        """Entries start:stop of the last axis."""

    @abstractmethod
    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Entries start:stop:step of an axis."""

    @abstractmethod
    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """-1 stands for the one size that is not known, 0 for that of the same axis of x."""

    @abstractmethod
    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Axes in another order."""

    @abstractmethod
    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        """`axis` counts from the first."""

    @abstractmethod
    def broadcast(self, x: Value, own: Sequence[Dim], shape: Sequence[Dim]) -> Value:
        """x, whose shape is `own`, in another shape, as numpy broadcasts."""

    @abstractmethod
    def sum_over_ranks(self, x: Value) -> Value:
        """Of several ranks."""

    def float32(self, name: str) -> Value:
        """A value of llmc's graph as f32."""
        x = self.value(name)
        return x if self.types[name].dtype == "f32" else self.cast(x, "f32")

    def all_reduce(self, x: Value) -> Value:
        """The sum over all ranks; nothing where there is one."""
        return self.sum_over_ranks(x) if self.tp > 1 else x

    def apply(self, name: str, *operands: Value) -> Value:
        """A function of plugins/pointwise."""
        if name in _COMPOSED:
            return cast(Value, _COMPOSED[name](self, *operands))
        return self.elementary(name, *operands)

    def formula(self, expr: str, operands: Sequence[Value], rank: int) -> Value:
        """A formula of operands i0, i1, ... whose value has that rank."""
        folded: Any = visit(expr, lambda i: operands[i], lambda value: self.number(value, rank), self.apply)
        return cast(Value, folded)

    def activated(self, y: Value, epilogue: str, columns: int) -> Value:
        """The epilogue of a product: "none", an activation, or "<activation>_gate", which multiplies the activation of
        the first `columns` by those that follow.
        """
        activation, gate, _ = epilogue.partition("_gate")
        if gate:
            left, right = self.last_columns(y, 0, columns), self.last_columns(y, columns, 2 * columns)
            return self.apply("mul", self.apply(activation, left), right)
        return y if activation == "none" else self.apply(activation, y)

    def rms_normed(self, x: Value, weight: Value, eps: float, rank: int) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight, over the last axis of an x of that rank."""
        square = self.apply("add", self.mean(self.apply("square", x)), self.number(eps, rank))
        return self.apply("mul", self.apply("div", x, self.apply("sqrt", square)), weight)

    def layer_normed(self, x: Value, weight: Value, bias: Value, eps: float, rank: int) -> Value:
        """The same of x - mean(x), plus `bias`."""
        centred = self.apply("sub", x, self.mean(x))
        return self.apply("add", self.rms_normed(centred, weight, eps, rank), bias)


#: Functions that no graph has, made of others.
_COMPOSED: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda e, x: e.apply("reciprocal", e.apply("sqrt", x)),
    "silu": lambda e, x: e.apply("mul", x, e.apply("sigmoid", x)),
    "square": lambda e, x: e.apply("mul", x, x),
    "log1p": lambda e, x: e.apply("log", e.apply("add", x, e.number(1.0, 1))),
    "expm1": lambda e, x: e.apply("sub", e.apply("exp", x), e.number(1.0, 1)),
}
