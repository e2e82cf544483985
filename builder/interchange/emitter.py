"""Builds the nodes of an ONNX graph. Comes in: operators with operands by name. Goes out: `NodeProto`s, small
constants. Must not know: llmc's operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from llmc.artifacts.types import Dim, TensorType

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


class Emitter:
    """Nodes in order. `types` has every value of llmc's graph by its name, which it keeps in ONNX. `tp`: ranks."""

    def __init__(self, types: Mapping[str, TensorType], tp: int = 1) -> None:
        self.types, self.tp = types, tp
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

    def cast(self, name: str, dtype: str) -> str:
        """The value in another dtype."""
        return self.op("Cast", name, to=ELEMENTS[dtype])

    def float32(self, name: str) -> str:
        """A value of llmc's graph as f32."""
        return name if self.types[name].dtype == "f32" else self.cast(name, "f32")

    def reshape(self, name: str, shape: Iterable[Dim]) -> str:
        """`shape` has at most one symbol."""
        return self.op("Reshape", name, self.integers([-1 if isinstance(d, str) else d for d in shape]))

    def slice(self, name: str, axis: int, start: int, stop: int, step: int = 1) -> str:
        """Entries start:stop:step of an axis."""
        return self.op("Slice", name, *(self.integers([n]) for n in (start, stop, axis, step)))

    def rename(self, since: int, names: Mapping[str, str]) -> None:
        """Gives results of the nodes from number `since` on other names; what none of them makes is passed on."""
        made = {output for node in self.nodes[since:] for output in node.output}
        for node in self.nodes[since:]:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) if name in made else name for name in field]
        for old, new in names.items():
            if old not in made:
                self.nodes.append(helper.make_node("Identity", [old], [new]))
