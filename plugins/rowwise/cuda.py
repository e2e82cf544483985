"""How the cuda targets call rowwise: the program becomes a kernel made of the functions in kernels.py and pointwise's.

Comes in: attributes and types. Goes out: `CudaCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, Temporary
from llmc.plugins.cuda.rows import power_of_two, row_stride, warps_of
from llmc.plugins.pointwise.cuda import Functions, number
from llmc.plugins.rowwise import Attrs
from llmc.plugins.rowwise.functions import CASTS
from llmc.plugins.rowwise.program import Call, input_name, is_rows, parse, row_types

#: Numbers of all values of a program together: a row of them lies in memory for each token of a step.
MAX_NUMBERS = 1 << 14
#: Axes of a row.
MAX_RANK = 3


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each row. Raises UnsupportedError for programs of too many numbers, or of rows with four axes."""
    program = _Program(attrs, inputs, outputs)
    if program.top > MAX_NUMBERS:
        raise UnsupportedError(f"a row program with {program.top} numbers: the cuda targets take {MAX_NUMBERS}")
    rows = outputs[0].shape[:1]
    args: dict[str, Arg] = {"values": Temporary("values", "f32", (Product((*rows, max(1, program.top))),))}
    for i, kind in enumerate(inputs):
        args[f"p{i}"] = Pointer("in", i)
        if is_rows(kind):
            args[f"s{i}"] = row_stride("in", i, kind) if kind.rank == 2 else _size(kind.shape[1:])
    for i, kind in enumerate(outputs):
        args[f"q{i}"] = Pointer("out", i)
        args[f"t{i}"] = row_stride("out", i, kind) if kind.rank == 2 else _size(kind.shape[1:])
    return (
        CudaCall(
            kernel="rowwise:program",
            args=args,
            constexprs={"TOTAL": program.top},
            grid=((Product(rows),),),
            num_warps=warps_of(program.widest),
            source=program.source(list(args)),
        ),
    )


def _size(shape: Sequence[int | str]) -> int:
    return prod(int(d) for d in shape)


class _Program:
    """The text of a kernel. A value's place is the text of a pointer to its first number."""

    def __init__(self, attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> None:
        self.attrs, self.inputs, self.outputs = attrs, inputs, outputs
        calls = parse(attrs.steps)
        self.known = row_types(calls, inputs)
        if any(kind.rank > MAX_RANK for kind in self.known.values()):
            raise UnsupportedError(f"a row program over rows of more than {MAX_RANK} axes")
        self.functions, self.steps = Functions(), set[str]()
        self.top, self.widest = 0, 1
        self.places: dict[str, str] = {}
        for i, kind in enumerate(inputs):
            self.places[input_name(i, kind)] = f"(p{i} + row * s{i})" if is_rows(kind) else f"p{i}"
        self.lines: list[str] = []
        for i, call in enumerate(calls):
            self._step(f"v{i}", call)

    def source(self, params: Sequence[str]) -> str:
        """The module."""
        results = []
        for i, (name, kind) in enumerate(zip(self.attrs.results, self.outputs, strict=True)):
            size = _size(kind.shape[1:])
            results += self._over(size)
            results.append(f"kept = tl.load({self.places[name]} + e, mask=inside, other=0)")
            results.append(f"tl.store(q{i} + row * t{i} + e, kept.to(q{i}.dtype.element_ty), mask=inside)")
        steps = f"from llmc.plugins.rowwise.kernels import {', '.join(sorted(self.steps))}" if self.steps else ""
        body = ["row = tl.program_id(0).to(tl.int64)", *self.lines, *results]
        lines = ["import triton", "import triton.language as tl", "", self.functions.imports() + steps, ""]
        lines += [
            "",
            "@triton.jit",
            f"def program({', '.join(params)}, TOTAL: tl.constexpr):",
            *(f"    {line}" for line in body),
            "",
        ]
        return "\n".join(lines)

    def _new(self, name: str) -> str:
        place = f"(values + row * TOTAL + {self.top})"
        self.top += _size(self.known[name].shape)
        self.places[name] = place
        return place

    def _over(self, size: int) -> list[str]:
        block = power_of_two(size)
        self.widest = max(self.widest, block)
        return [f"e = tl.arange(0, {block})", f"inside = e < {size}"]

    def _step(self, name: str, call: Call) -> None:
        if call.name == "reshape":
            self.places[name] = self.places[call.args[0]]
            return
        reads = {value: self.places[value] for value in call.values()}
        place = self._new(name)
        if call.elementwise or call.name == "fill":
            self.lines += self._map(name, call, place)
        else:
            self.lines += self._row_call(name, call, reads, place)
        self.lines.append("tl.debug_barrier()")

    def _map(self, name: str, call: Call, place: str) -> list[str]:
        """An elementwise step over the flat row; operands broadcast by index arithmetic."""
        kind = self.known[name]
        size = _size(kind.shape)
        block = str(power_of_two(size))
        loads: dict[str, str] = {}

        def operand(value: str) -> str:
            if value not in loads:
                where = f"{self.places[value]} + {self._index(value, name)}"
                loads[value] = f"x{len(loads)} = tl.load({where}, mask=inside, other=0).to(tl.float32)"
            return loads[value].partition(" ")[0]

        def formula(arg: Any) -> str:
            if isinstance(arg, str):
                return operand(arg)
            if isinstance(arg, int | float):
                return number(float(arg), block)
            operands = [formula(a) for a in arg.args]
            if arg.name in CASTS:
                self.steps.add(f"as_{arg.name}")
                return f"as_{arg.name}({', '.join(operands)})"
            return self.functions.call(arg.name, *operands)

        value = formula(call.args[0] if call.name == "fill" else call)
        return [*self._over(size), *loads.values(), f"tl.store({place} + e, {value}, mask=inside)"]

    def _index(self, value: str, result: str) -> str:
        """Where number e of the result is, or is broadcast from, in an operand."""
        own, whole = self.known[value].shape, self.known[result].shape
        if _size(own) == 1:
            return "e * 0"
        if _size(own) == _size(whole):
            return "e"
        terms = []
        for axis, size in enumerate(own):
            out = axis + len(whole) - len(own)
            if size != 1:
                after = _size(whole[out + 1 :])
                terms.append(f"e // {after} % {size} * {_size(own[axis + 1 :])}")
        return "(" + " + ".join(terms) + ")"

    def _call(self, function: str, values: Sequence[str], sizes: Sequence[Any], rows: int, columns: int) -> str:
        """A call of a step, with the block that covers `rows` and `columns`."""
        self.steps.add(function)
        blocks = (power_of_two(rows), power_of_two(columns))
        self.widest = max(self.widest, prod(blocks))
        return f"{function}({', '.join(map(str, (*values, *sizes, *blocks)))})"

    def _row_call(self, name: str, call: Call, reads: dict[str, str], place: str) -> list[str]:
        shape = [int(d) for d in self.known[call.args[0]].shape]
        rows, width = _size(shape[:-1]), shape[-1]
        first = reads[call.args[0]]
        count = int(self.known[name].shape[-1])
        match call.name:
            case "topk" | "bottomk":
                sizes: list[Any] = [count, call.name == "topk", rows, width]
                return [self._call("topk", [first, place], sizes, rows, width)]
            case "gather":
                values = [first, reads[call.args[1]], place]
                return [self._call("gather", values, [rows, width, count], rows, count)]
            case "scatter":
                _, index, source = call.args
                chosen = int(self.known[index].shape[-1])
                given = reads[source] if isinstance(source, str) else "None"
                fixed = "None" if isinstance(source, str) else repr(float(source)).replace("inf", 'float("inf")')
                values = [first, reads[index], given, place]
                return [self._call("scatter", values, [fixed, rows, width, chosen], rows, width)]
            case "slice":
                axis, start, _, step = call.args[1:]
                inner, length = _size(shape[axis + 1 :]), int(self.known[name].shape[axis])
                outer = _size(shape[:axis])
                sizes = [outer, length, inner, shape[axis] * inner, start * inner, step * inner, length * inner, 0]
                return [self._call("place", [first, place], sizes, outer, length * inner)]
            case "concat":
                lines, at = [], 0
                for value in call.args:
                    part = int(self.known[value].shape[-1])
                    sizes = [rows, part, 1, part, 0, 1, count, at]
                    lines.append(self._call("place", [reads[value], place], sizes, rows, part))
                    at += part
                return lines
        kind = call.name.removeprefix("reduce_")
        return [self._call("reduce", [first, place], [f'"{kind}"', rows, width], rows, width)]
