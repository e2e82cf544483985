"""Builds our graph while a table walks the exported one: names, types, constants, weights.

Comes in: an `Exported`, names and shapes of the checkpoint's tensors. Goes out: nodes. Must not know: ATen operators.

A value is a `Name` in our graph or a constant (a real torch tensor): what depends on neither inputs nor weights is
computed by PyTorch itself while tracing, so that frequencies, scales and slopes arrive as numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.builder.ir import Node
from llmc.builder.naming import shape_of
from llmc.builder.operators import ALL
from llmc.builder.primitives.shapes import count
from llmc.builder.trace.export import Exported
from llmc.builder.trace.places import module_path, source_line
from llmc.builder.weights.recipe import Load


def _shortest(number: np.generic) -> float:
    """The Python number with the fewest digits that is this one in its own dtype: 0.044715, not 0.04471499845."""
    return number.item() if isinstance(number, np.integer | np.bool_) else float(str(number))


class Name(str):
    """A value of our graph: a type of its own, so that an option that is a string is told apart from it."""

    __slots__ = ()


Value: TypeAlias = Name | torch.Tensor


@dataclass(frozen=True)
class Complex:
    """A traced complex tensor: its real and its imaginary part, both f32 and of its shape."""

    real: Name
    imag: Name


#: Integers are 32 bits wide in our graphs: they are ids, positions and row numbers.
_DTYPES = {torch.float32: "f32", torch.int64: "i32", torch.int32: "i32", torch.bool: "bool"}


class Emitter:
    """The graph under construction. `at` is the node being translated, for names, paths and errors."""

    def __init__(self, exported: Exported, tensors: Mapping[str, Sequence[int]] | None) -> None:
        self.exported = exported
        self.tensors = tensors or {}
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.recipes: dict[str, str] = {}
        self._by_recipe: dict[str, Name] = {}
        self.buffers: dict[str, np.ndarray] = {}
        self.symbols: dict[Any, str] = {}
        self._joined: dict[str, Node] = {}  # concats, by their value
        self.at: torch.fx.Node | None = None
        self._consts: dict[tuple[TensorType, tuple[float, ...]], Name] = {}

    # -- nodes

    def emit(self, op: str, inputs: Sequence[str], stem: str | None = None, **attrs: Any) -> Name:
        """Appends a node whose type follows from the operator's rule; returns its value."""
        operator = ALL[op]
        values = operator.attrs(**attrs)
        try:
            (kind,) = operator.infer(values, [self.types[name] for name in inputs])
        except ValueError as error:
            raise self.unsupported(str(error)) from error
        return self._append(op, tuple(inputs), values, kind, stem)

    def _append(self, op: str, inputs: tuple[str, ...], attrs: Any, kind: TensorType, stem: str | None = None) -> Name:
        name = self._fresh(stem or (self.at.name if self.at else op))
        path = module_path(self.at) if self.at and op != "const" else ""  # constants are shared by modules
        self.nodes.append(Node(op, inputs, attrs, (name,), (kind,), path))
        self.types[name] = kind
        if op == "concat":
            self._joined[name] = self.nodes[-1]
        return name

    def _fresh(self, stem: str) -> Name:
        name, count = stem, 0
        while name in self.types:
            count += 1
            name = f"{stem}.{count}"
        return Name(name)

    def parts(self, value: str, axis: int) -> list[tuple[Name, int]]:
        """The values that a concat along this axis joins, each with its first entry; none for anything else."""
        node = self._joined.get(value)
        if node is None or node.attrs.axis % node.type.rank != axis:
            return []
        sizes = [size for name in node.inputs if isinstance(size := self.types[name].shape[axis], int)]
        if len(sizes) != len(node.inputs):
            return []
        firsts = itertools.accumulate(sizes, initial=0)
        return [(Name(name), first) for name, first in zip(node.inputs, firsts, strict=False)]

    # -- sources

    def input(self, name: str, kind: TensorType) -> Name:
        """One of the step's arrays."""
        return self._append("input", (), ALL["input"].attrs(name=name), kind, name)

    def weight(self, name: str, kind: TensorType) -> Name:
        """A parameter, as the checkpoint stores it under any of its names."""
        names = self.exported.names.get(name, (name,))
        if self.exported.stored is None:
            return self.param(str(Load(names[0])), kind, names[0])
        held = next((n for n in names if n in self.exported.stored), None)
        if held is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {' or '.join(names)}, which its config asks for ({kind}); "
                "is config.json that of another model, or a file of the checkpoint missing?"
            )
        recipe = self.exported.stored[held]
        shape = shape_of(recipe, self.tensors)
        if shape != kind.shape:
            raise CheckpointError(
                f"the checkpoint's tensor {recipe.name if isinstance(recipe, Load) else held} has shape {list(shape)}, "
                f"its config asks for {list(kind.shape)}; is config.json that of another model?"
            )
        return self.param(str(recipe), kind, held)

    def param(self, recipe: str, kind: TensorType, stem: str) -> Name:
        """A weight by recipe; the same recipe gives the same value."""
        if recipe not in self._by_recipe:
            name = self._append("param", (), ALL["param"].attrs(recipe=recipe), kind, stem)
            self._by_recipe[recipe], self.recipes[name] = name, recipe
        return self._by_recipe[recipe]

    def transposed(self, weight: str) -> Name | None:
        """A matrix weight with its axes exchanged, as a weight again; None where the value is no matrix weight."""
        recipe, kind = self.recipes.get(weight), self.types[weight]
        if recipe is None or kind.rank != 2:
            return None
        known = recipe.startswith("transpose(")
        turned = recipe[len("transpose(") : -1] if known else f"transpose({recipe})"
        return self.param(turned, TensorType(kind.dtype, kind.shape[::-1]), f"{weight}.t")

    def scalar(self, number: float, dtype: str) -> Name:
        """A constant of shape []."""
        return self._const(TensorType(dtype, ()), (number,))

    def const(self, dtype: str, numbers: Iterable[float]) -> Name:
        """A constant of shape [n]."""
        values = tuple(numbers)
        return self._const(TensorType(dtype, (len(values),)), values)

    def _const(self, kind: TensorType, values: tuple[float, ...]) -> Name:
        exact = tuple(_shortest(v) for v in np.array(values, NUMPY_DTYPES[kind.dtype]))
        key = (kind, exact)
        if key not in self._consts:
            self._consts[key] = self._append("const", (), ALL["const"].attrs(values=exact), kind, "const")
        return self._consts[key]

    def value(self, value: Value) -> Name:
        """A value's name in the graph: constants of one element become `const`, larger ones a buffer of the plan."""
        if isinstance(value, Name):
            return value
        if value.device.type == "meta":
            raise self.unsupported("it reads a buffer that the model fills only when it loads weights")
        kind = TensorType(self.dtype(value.dtype), tuple(value.shape))
        array = value.detach().contiguous().numpy().astype(NUMPY_DTYPES[kind.dtype])
        if array.size == 1:
            return self._const(kind, (array.item(),))
        return self.param(f"buffer({self._buffer(array)!r})", kind, "buffer")

    def _buffer(self, array: np.ndarray) -> str:
        """Files a constant under the name of the model's buffer that it equals, or of the module that made it."""
        for name, known in self.buffers.items():
            if known.shape == array.shape and known.dtype == array.dtype and np.array_equal(known, array):
                return name
        stem = self._buffer_name(array)
        name, count = stem, 0
        while name in self.buffers:
            count += 1
            name = f"{stem}.{count}"
        self.buffers[name] = array
        return name

    def _buffer_name(self, array: np.ndarray) -> str:
        for name, known in self.exported.buffers.items():
            if known.device.type != "meta" and np.array_equal(known.numpy(), array):
                return name
        return ".".join(filter(None, (module_path(self.at), self.at.name))) if self.at else "constant"

    # -- types

    def dtype(self, dtype: torch.dtype) -> str:
        """Our name of a dtype."""
        if dtype not in _DTYPES:
            raise self.unsupported(f"it computes in {dtype}")
        return _DTYPES[dtype]

    def shape(self, tensor: Any) -> tuple[Dim, ...]:
        """A traced tensor's shape with T and S. An axis of 4 T, heads merged with tokens, counts as the two that it was
        made of, T and 4 (4 and T where `regrouped` finds that order). Raises UnsupportedError for other arithmetic.
        """
        return tuple(dim for d in tensor.shape for dim in self.dims(d))

    def regrouped(self, before: Sequence[Dim], tensor: Any) -> tuple[Dim, ...]:
        """The shape of a traced tensor that is another view of a value of shape `before`: where that has heads before
        tokens, an axis of both keeps them in this order.
        """
        after: list[Dim] = []
        for dim in tensor.shape:
            dims = self.dims(dim)
            turned = dims[::-1]
            places = (i for i in range(len(before)) if tuple(before[i : i + 2]) == turned)
            found = len(dims) > 1 and any(count(before[:i]) == count(after) for i in places)
            after += turned if found else dims
        return tuple(after)

    def fits(self, kind: TensorType, node: torch.fx.Node) -> bool:
        """Whether a value of this type is what the tracer found for a node: an axis of heads and tokens may have either
        first.
        """
        tensor = node.meta["val"]
        place = 0
        for dim in tensor.shape:
            dims = self.dims(dim)
            if kind.shape[place : place + len(dims)] not in (dims, dims[::-1]):
                return False
            place += len(dims)
        return place == kind.rank and kind.dtype == self.dtype(tensor.dtype)

    def dims(self, dim: Any) -> tuple[Dim, ...]:
        """What one traced dimension counts as."""
        if isinstance(dim, int):
            return (dim,)
        count, symbol = dim.node.expr.as_coeff_Mul()
        if symbol not in self.symbols or count.q != 1 or count < 1:
            raise self.unsupported(f"it makes a dimension of size {dim.node.expr}")
        return (self.symbols[symbol],) if count == 1 else (self.symbols[symbol], int(count))

    def kind(self, node: torch.fx.Node) -> TensorType:
        """The type that the tracer found for a node's tensor."""
        tensor = node.meta["val"]
        return TensorType(self.dtype(tensor.dtype), self.shape(tensor))

    def unsupported(self, reason: str) -> UnsupportedError:
        """The error that names the operator being translated, its module and its source line."""
        node = self.at
        if node is None:
            return UnsupportedError(reason)
        return UnsupportedError(
            f"operator {node.target} in module {module_path(node) or '(model)'}{source_line(node)} "
            f"cannot be compiled: {reason}"
        )
