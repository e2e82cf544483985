"""Builds the nodes of an ONNX graph. Comes in: operators with operands by name. Goes out: `NodeProto`s, small
constants. Must not know: llmc's operators.

A truth is 1 or 0 in f32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from llmc.artifacts.types import Dim, TensorType
from llmc.builder.translation.writer import GraphWriter

#: The domain of operators that ONNX has not.
DOMAIN = "llmc"
#: dtype of a graph -> ONNX's element type.
ELEMENTS = {
    "f32": TensorProto.FLOAT,
    "bf16": TensorProto.BFLOAT16,
    "f16": TensorProto.FLOAT16,
    "f8e4m3": TensorProto.FLOAT8E4M3FN,
    "u4": TensorProto.UINT4,
    "u8": TensorProto.UINT8,
    "i8": TensorProto.INT8,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
_FUNCTIONS = {
    "neg": "Neg", "exp": "Exp", "log": "Log", "tanh": "Tanh", "cos": "Cos", "sin": "Sin", "sqrt": "Sqrt",
    "sigmoid": "Sigmoid", "relu": "Relu", "erf": "Erf", "abs": "Abs", "floor": "Floor", "ceil": "Ceil",
    "round": "Round", "sign": "Sign", "reciprocal": "Reciprocal", "add": "Add", "sub": "Sub", "mul": "Mul",
    "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min", "gelu": "Gelu",
}  # fmt: skip
_COMPARE = {"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal"}
_LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_not": "Not"}


class Emitter(GraphWriter[str]):
    """Nodes in order. Values of llmc's graph keep their names in ONNX."""

    def __init__(self, types: Mapping[str, TensorType], tp: int = 1) -> None:
        super().__init__(types, tp)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._count = 0

    def op(self, kind: str, *inputs: str, domain: str = "", results: int = 1, **attrs: Any) -> str:
        """Adds a node and returns its first result's name; the others' are those of `outputs`."""
        self._count += 1
        outputs = [f"onnx.{self._count}" + (f".{i}" if i else "") for i in range(results)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attrs))
        return outputs[0]

    def outputs(self, count: int) -> list[str]:
        """The results of the last node."""
        return list(self.nodes[-1].output)[:count]

    def constant(self, value: Any, dtype: str) -> str:
        """A small constant; the same one each time."""
        array = np.asarray(value, helper.tensor_dtype_to_np_dtype(ELEMENTS[dtype]))
        name = f"const.{dtype}.{array.tobytes().hex()}.{'x'.join(map(str, array.shape))}"
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def integers(self, values: Iterable[int]) -> str:
        """i64[n]: a shape, axes, bounds of slices."""
        return self.constant(list(values), "i64")

    def value(self, name: str) -> str:
        """Its name."""
        return name

    def number(self, value: float, rank: int) -> str:
        """A scalar, which broadcasts over all ranks."""
        return self.constant(value, "f32")

    def cast(self, x: str, dtype: str) -> str:
        """A node, whatever the dtype was."""
        return self.op("Cast", x, to=ELEMENTS[dtype])

    def elementary(self, name: str, *operands: str) -> str:
        """Raises ValueError for a function without operator."""
        if name in _FUNCTIONS:
            return self.op(_FUNCTIONS[name], *operands)
        if name in _COMPARE:
            return self.cast(self.op(_COMPARE[name], *operands), "f32")
        if name in _LOGIC:
            return self.cast(self.op(_LOGIC[name], *(self.cast(x, "bool") for x in operands)), "f32")
        match name:
            case "gelu_tanh":
                return self.op("Gelu", *operands, approximate="tanh")
            case "ne":
                return self.cast(self.op("Not", self.op("Equal", *operands)), "f32")
            case "where":
                condition, yes, no = operands
                return self.op("Where", self.cast(condition, "bool"), yes, no)
        raise ValueError(f"the function {name} has no ONNX operator")

    def layer_normed(self, x: str, weight: str, bias: str, eps: float, rank: int) -> str:
        """ONNX has an operator for it."""
        return self.op("LayerNormalization", x, weight, bias, epsilon=eps)

    def mean(self, x: str) -> str:
        """Over the last axis."""
        return self.op("ReduceMean", x, self.integers([-1]))

    def gather(self, table: str, rows: str) -> str:
        """Rows of a table."""
        return self.op("Gather", table, rows)

    def last_columns(self, x: str, start: int, stop: int) -> str:
        """A slice."""
        return self.slice(x, -1, start, stop)

    def slice(self, x: str, axis: int, start: int, stop: int, step: int = 1) -> str:
        """Of any axis."""
        return self.op("Slice", x, *(self.integers([n]) for n in (start, stop, axis, step)))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """0 and -1 mean in ONNX what they mean here."""
        return self.op("Reshape", x, self.integers(shape))

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        """Axes in another order."""
        return self.op("Transpose", x, perm=list(perm))

    def concat(self, parts: Sequence[str], axis: int) -> str:
        """Along an axis."""
        return self.op("Concat", *parts, axis=axis)

    def broadcast(self, x: str, own: Sequence[Dim], shape: Sequence[Dim]) -> str:
        """Symbols are as many as the step's tokens and rows of logits."""
        widened = (1,) * (len(shape) - len(own)) + tuple(own)
        # An axis that x has already stays as it is: 1 asks for nothing in an Expand.
        sizes = [1 if d == o else d for d, o in zip(shape, widened, strict=True)]
        counts = {"T": "ids", "S": "rows"}
        parts = [self.op("Shape", counts[d]) if isinstance(d, str) else self.integers([d]) for d in sizes]
        return self.op("Expand", x, self.concat(parts, 0))

    def sum_over_ranks(self, x: str) -> str:
        """An operator of llmc's domain."""
        return self.op("AllReduce", x, domain=DOMAIN, ranks=self.tp)

    def rename(self, since: int, names: Mapping[str, str]) -> None:
        """Gives results of the nodes from number `since` on other names; what none of them makes is passed on."""
        made = {output for node in self.nodes[since:] for output in node.output}
        for node in self.nodes[since:]:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) if name in made else name for name in field]
        for old, new in names.items():
            if old not in made:
                self.nodes.append(helper.make_node("Identity", [old], [new]))
