"""Programs over rows in ONNX's operators: what chooses experts. Comes in: a `Node`, an `Emitter`. Goes out: the
results' names. Must not know: files, what the program is for.

Truths are 1 and 0 in f32, and formulas of whole numbers are computed in f32, which holds them exactly up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.artifacts.types import TensorType
from llmc.builder.interchange.emitter import Emitter
from llmc.builder.ir import Node
from llmc.plugins.rowwise.functions import CASTS
from llmc.plugins.rowwise.program import Call, input_name, is_rows, parse, row_types

_REDUCTIONS = {"reduce_mean": "ReduceMean", "reduce_sum": "ReduceSum", "reduce_max": "ReduceMax"}


def rowwise(e: Emitter, node: Node) -> list[str]:
    """Every step in order. Raises ValueError for a function without ONNX form."""
    types = [e.types[name] for name in node.inputs]
    calls = parse(node.attrs.steps)
    first = next(name for name, kind in zip(node.inputs, types, strict=True) if is_rows(kind))
    count = e.op("Slice", e.op("Shape", first), *(e.integers([n]) for n in (0, 1)))
    program = _Program(e, row_types(calls, types), count)
    for number, (name, kind) in enumerate(zip(node.inputs, types, strict=True)):
        rows = name if is_rows(kind) else program.filled(name, kind.shape, with_rows=False)
        program.values[input_name(number, kind)] = rows
    for number, call in enumerate(calls):
        name = f"v{number}"
        program.values[name] = program.elementwise(name, call) if call.elementwise else program.step(call)
    return [program.values[name] for name in node.attrs.results]


class _Program:
    """`kinds`: the type of a row of each value; `values`: what it is in ONNX, the rows' axis first; `count` i64[1]."""

    def __init__(self, e: Emitter, kinds: dict[str, TensorType], count: str) -> None:
        self.e, self.kinds, self.count = e, kinds, count
        self.values: dict[str, str] = {}

    def filled(self, x: str, sizes: Sequence[Any], with_rows: bool = True) -> str:
        """x for every row, in `sizes`; without rows of its own it gets their axis."""
        e = self.e
        shape = e.op("Concat", self.count, e.integers([int(n) for n in sizes]), axis=0) if sizes else self.count
        return e.op("Expand", x if with_rows else e.op("Unsqueeze", x, e.integers([0])), shape)

    def elementwise(self, name: str, call: Call) -> str:
        """A formula, in the dtype of its value."""
        y = self._formula(call, len(self.kinds[name].shape))
        return self.e.cast(y, "i32") if self.kinds[name].dtype == "i32" else y

    def _formula(self, arg: Any, rank: int) -> str:
        """In f32; every operand gets the axes of a row of `rank`."""
        e = self.e
        if isinstance(arg, int | float):
            return e.constant(float(arg), "f32")
        if isinstance(arg, str):
            x, kind = self.values[arg], self.kinds[arg]
            x = e.cast(x, "f32") if kind.dtype == "i32" else x
            missing = rank - len(kind.shape)
            return e.op("Unsqueeze", x, e.integers(range(1, missing + 1))) if missing else x
        operands = [self._formula(a, rank) for a in arg.args]
        if arg.name not in CASTS:
            return e.apply(arg.name, *operands)
        (x,) = operands
        match arg.name:
            case "i32":
                return e.cast(e.cast(x, "i32"), "f32")
            case "bool":
                return e.apply("ne", x, e.constant(0.0, "f32"))
        return x

    def step(self, call: Call) -> str:
        """A step on whole rows."""
        e, first = self.e, call.args[0]
        kind = self.kinds[first] if isinstance(first, str) else TensorType("f32", ())
        x = self.values[first] if isinstance(first, str) else e.constant(float(first), "f32")
        match call.name, call.args[1:]:
            case "reshape", sizes:
                return e.reshape(x, [0, *sizes])  # a 0 keeps the axis
            case "fill", sizes:
                missing = len(sizes) - len(kind.shape)
                if isinstance(first, str) and missing:
                    x = e.op("Unsqueeze", x, e.integers(range(1, missing + 1)))
                return self.filled(x, sizes)
            case (("topk" | "bottomk"), (k,)):
                largest = int(call.name == "topk")
                e.op("TopK", x, e.integers([k]), results=2, axis=-1, largest=largest, sorted=1)
                return e.cast(e.outputs(2)[1], "i32")
            case "gather", (index,):
                return e.op("GatherElements", x, self.values[index], axis=len(kind.shape))
            case "scatter", (index, source):
                if isinstance(source, str):
                    new = self.values[source]
                else:
                    dtype = "i32" if kind.dtype == "i32" else "f32"
                    new = e.op("Expand", e.constant(source, dtype), e.op("Shape", self.values[index]))
                return e.op("ScatterElements", x, self.values[index], new, axis=len(kind.shape))
            case "slice", (axis, start, stop, step):
                return e.slice(x, axis + 1, start, stop, step)
            case "concat", _:
                return e.concat([self.values[name] for name in call.args], -1)
        return e.op(_REDUCTIONS[call.name], x, e.integers([-1]), keepdims=1)
