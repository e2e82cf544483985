"""How the cpu target calls rowwise: the program becomes a C++ struct made of the functions in cpu.h.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import C_TYPES, Arg, CpuCall, KernelEnv, Pointer, Product, row_stride, strided_rows
from llmc.plugins.pointwise.cpu import float_text
from llmc.plugins.rowwise import Attrs
from llmc.plugins.rowwise.functions import CASTS
from llmc.plugins.rowwise.program import Call, input_name, is_rows, parse, row_types

#: Numbers of all values of a program together: they live on a thread's stack.
MAX_NUMBERS = 1 << 16
#: Axes of a row.
MAX_RANK = 3
_SPARE = 16


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Rows that are matrices may have a row stride."""
    calls = parse(attrs.steps)
    known = row_types(calls, inputs)
    if sum(_size(kind) + _SPARE for kind in known.values()) > MAX_NUMBERS:
        raise UnsupportedError(f"a row program with more than {MAX_NUMBERS} numbers at once, {len(calls)} steps")
    if any(kind.rank > MAX_RANK for kind in known.values()):
        raise UnsupportedError(f"a row program over rows of more than {MAX_RANK} axes")
    text = _run(attrs, calls, known, inputs, outputs)
    struct = f"Rows{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    args: list[Arg] = [Product(outputs[0].shape[:1])]
    for i, kind in enumerate(inputs):
        args += [Pointer("in", i), *([_stride(i, kind)] if is_rows(kind) else [])]
    args += [Pointer("out", i) for i in range(len(outputs))]
    rows = [i for i, kind in enumerate(inputs) if is_rows(kind)]
    return CpuCall(
        header="plugins/rowwise/cpu.h",
        function=f"rowwise<{struct}>",
        args=tuple(args),
        prelude=f"struct {struct} {{\n{text}}};",
        strided=strided_rows(inputs, [i for i in range(len(inputs)) if i not in rows]),
    )


def _stride(index: int, kind: TensorType) -> Arg:
    return row_stride("in", index, kind) if kind.rank == 2 else Product(kind.shape[1:])


def _size(kind: TensorType) -> int:
    return prod(int(d) for d in kind.shape)


def _run(attrs: Attrs, calls: Sequence[Call], known: dict[str, TensorType], inputs: Sequence[TensorType],
         outputs: Sequence[TensorType]) -> str:  # fmt: skip
    """The struct's function: weights are fetched once, then each row is computed from step to step."""
    params: list[str] = []
    once: list[str] = []
    each: list[str] = []
    for i, kind in enumerate(inputs):
        name, size = input_name(i, kind), _size(known[input_name(i, kind)])
        params.append(f"const {C_TYPES[kind.dtype]}* p{i}" + (f", int64_t s{i}" if is_rows(kind) else ""))
        source = f"p{i} + row * s{i}" if is_rows(kind) else f"p{i}"
        (each if is_rows(kind) else once).append(f"{_array(name, size)} rw::fetch<{size}>({source}, {name});")
    for i, call in enumerate(calls):
        each.append(_step(f"v{i}", call, known))
    for i, (name, kind) in enumerate(zip(attrs.results, outputs, strict=True)):
        params.append(f"{C_TYPES[kind.dtype]}* q{i}")
        size = _size(known[name])
        each.append(f"rw::keep<{size}>({name}, q{i} + row * {size});")
    lines = [
        f"  static void run(int64_t first, int64_t last, {', '.join(params)}) {{",
        *(f"    {line}" for line in once),
        "    for (int64_t row = first; row < last; ++row) {",
        *(f"      {line}" for line in each),
        "    }",
        "  }",
    ]
    return "\n".join(lines) + "\n"


def _array(name: str, size: int) -> str:
    return f"alignas(64) float {name}[{size + _SPARE}] = {{}};"


def _step(name: str, call: Call, known: dict[str, TensorType]) -> str:
    kind = known[name]
    if call.name == "reshape":
        return f"const float* {name} = {call.args[0]};"
    make = _map(name, call, known) if call.elementwise or call.name == "fill" else _row_call(name, call, known)
    return f"{_array(name, _size(kind))} {make}"


def _three(kind: TensorType) -> tuple[int, int, int]:
    a, b, c = ((1,) * (MAX_RANK - kind.rank) + tuple(int(d) for d in kind.shape))[-MAX_RANK:]
    return a, b, c


def _map(name: str, call: Call, known: dict[str, TensorType]) -> str:
    """An elementwise step as one loop; where all operands have the result's shape, over one long row."""
    whole = _three(known[name])
    flat = all(known[n].shape == known[name].shape or _size(known[n]) == 1 for n in call.values())
    dims = (1, 1, _size(known[name])) if flat else whole

    def operand(value: str) -> str:
        own = (1, 1, _size(known[value])) if flat else _three(known[value])
        strides = [own[1] * own[2] * (own[0] > 1), own[2] * (own[1] > 1)]
        offset = "".join(f" + {axis} * {stride}" for axis, stride in zip("ab", strides, strict=True) if stride)
        return f"rw::read<{int(own[2] > 1)}>({value}{offset}, c)"

    body = operand(call.args[0]) if call.name == "fill" and isinstance(call.args[0], str) else None
    if call.name == "fill" and body is None:
        body = f"splat({float_text(call.args[0])})"
    body = body or _formula(call, operand)
    return f"rw::map<{', '.join(map(str, dims))}>({name}, [&](int a, int b, int c) {{ return {body}; }});"


def _formula(arg: Any, operand: Any) -> str:
    if isinstance(arg, str):
        return str(operand(arg))
    if isinstance(arg, int | float):
        return f"splat({float_text(arg)})"
    return (
        f"{'rw::as_' if arg.name in CASTS else 'fn::'}{arg.name}({', '.join(_formula(a, operand) for a in arg.args)})"
    )


def _row_call(name: str, call: Call, known: dict[str, TensorType]) -> str:
    x = known[call.args[0]]
    shape = [int(d) for d in x.shape]
    rows, n = prod(shape[:-1]), shape[-1]
    m = int(known[name].shape[-1])
    match call.name:
        case "topk" | "bottomk":
            sizes, values = [rows, n, m, "true" if call.name == "topk" else "false"], [call.args[0]]
            return _call("topk", sizes, [*values, name])
        case "gather":
            return _call("gather", [rows, n, m], [*call.args, name])
        case "scatter":
            _, index, source = call.args
            count = int(known[index].shape[-1])
            if isinstance(source, str):
                return _call("scatter", [rows, n, count, 1], [call.args[0], index, source, name])
            return f"const float {name}_put = {float_text(source)}; " + _call(
                "scatter", [rows, n, count, 0], [call.args[0], index, f"&{name}_put", name]
            )
        case "slice":
            axis, start, _, step = call.args[1:]
            sizes = [prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]), start, known[name].shape[axis], step]
            return _call("slice", sizes, [call.args[0], name])
        case "concat":
            at, parts = 0, []
            for value in call.args:
                width = int(known[value].shape[-1])
                parts.append(_call("place", [rows, width, m, at], [value, name]))
                at += width
            return " ".join(parts)
    kind = call.name.removeprefix("reduce_").capitalize()
    return _call("reduce", [rows, n, f"red::{kind}"], [call.args[0], name])


def _call(function: str, sizes: Sequence[Any], values: Sequence[str]) -> str:
    return f"rw::{function}<{', '.join(map(str, sizes))}>({', '.join(values)});"
