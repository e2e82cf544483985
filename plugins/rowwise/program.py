"""Programs over rows: steps as text, their types, their values in numpy.

Comes in: the text of steps, types or arrays of inputs. Goes out: `parse`, `row_types`, `run`. Must not know: C++,
graphs.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.pointwise.functions import FUNCTIONS, TRUTHS
from llmc.plugins.rowwise.functions import CASTS, ELEMENTWISE, LOGICAL, REDUCTIONS, top

#: Steps on whole rows -> how many values they read (None: any number), how many integers follow (None likewise).
ROW_STEPS: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(REDUCTIONS, (1, 0)),
    "topk": (1, 1),
    "bottomk": (1, 1),
    "gather": (2, 0),
    "scatter": (3, 0),
    "slice": (1, 4),
    "concat": (None, 0),
    "reshape": (1, None),
    "fill": (1, None),
}


@dataclass(frozen=True)
class Call:
    """`name` applied to values (by name), numbers, and in elementwise formulas further calls."""

    name: str
    args: tuple[Any, ...]

    def values(self) -> list[str]:
        """The names of the values that it reads, in order, repeated where read twice."""
        found: list[str] = []
        for arg in self.args:
            found += arg.values() if isinstance(arg, Call) else [arg] if isinstance(arg, str) else []
        return found

    @property
    def elementwise(self) -> bool:
        """Whether each number of the result depends on one number of each operand."""
        return self.name in ELEMENTWISE


def parse(steps: Sequence[str]) -> tuple[Call, ...]:
    """The steps as calls; raises ValueError with the text of one that cannot be read."""
    calls = []
    for text in steps:
        try:
            call = _expression(ast.parse(text, mode="eval").body)
            if not isinstance(call, Call):
                raise ValueError("a step is a call")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"cannot read the step {text!r}: {error}") from error
        calls.append(call)
    return tuple(calls)


def _expression(tree: ast.expr, inside: bool = False) -> Any:
    match tree:
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Name(id=name):
            return name
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _expression(operand)
            if isinstance(number, int | float):
                return -number
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name in ELEMENTWISE:
                if len(args) != ELEMENTWISE[name]:
                    raise ValueError(f"{name} takes {ELEMENTWISE[name]} operands, not {len(args)}")
                return Call(name, tuple(_expression(a, True) for a in args))
            if name in ROW_STEPS and not inside:
                return _row_step(name, [_expression(a) for a in args])
            raise ValueError(f"{name} is no function, or none that a formula may contain")
    raise ValueError(f"{ast.unparse(tree)!r} is neither a value, a number nor a call")


def _row_step(name: str, args: list[Any]) -> Call:
    values, numbers = ROW_STEPS[name]
    reads = len(args) if values is None else values
    source = name in ("scatter", "fill")  # the last value that they read may be a number
    good = all(isinstance(a, str) or (source and i == reads - 1) for i, a in enumerate(args[:reads]))
    good &= reads >= 1 and all(isinstance(a, int) for a in args[reads:])
    if not good or len(args) < reads or (numbers is not None and len(args) != reads + numbers):
        raise ValueError(f"{name} is not applied to {', '.join(map(str, args))}")
    return Call(name, tuple(args))


def is_rows(kind: TensorType) -> bool:
    """Whether an input has a row for each token; else it is the same for all."""
    return bool(kind.shape) and isinstance(kind.shape[0], str)


def input_name(number: int, kind: TensorType) -> str:
    """How steps name an input."""
    return f"{'i' if is_rows(kind) else 'w'}{number}"


def row_types(calls: Sequence[Call], inputs: Sequence[TensorType]) -> dict[str, TensorType]:
    """The dtype and the shape of a row of every value by name; raises ValueError for what does not fit."""
    known: dict[str, TensorType] = {}
    for number, kind in enumerate(inputs):
        shape = kind.shape[1:] if is_rows(kind) else kind.shape
        if not all(isinstance(d, int) for d in shape):
            raise ValueError(f"{kind} has rows of unknown size")
        known[input_name(number, kind)] = TensorType(kind.dtype, shape)
    for number, call in enumerate(calls):
        try:
            known[f"v{number}"] = _formula_type(call, known) if call.elementwise else _step_type(call, known)
        except KeyError as error:
            raise ValueError(f"step v{number} reads {error}, which is no value before it") from error
        except ValueError as error:
            raise ValueError(f"step v{number}, {call.name}: {error}") from error
    return known


def _formula_type(arg: Any, known: dict[str, TensorType]) -> TensorType:
    if isinstance(arg, str):
        return known[arg]
    kinds = [_formula_type(a, known) for a in arg.args if not isinstance(a, int | float)]
    shape = tuple(np.broadcast_shapes(*(tuple(int(d) for d in k.shape) for k in kinds)))
    dtypes = [k.dtype for k in kinds]
    if arg.name in CASTS:
        return TensorType(arg.name, shape)
    if arg.name in LOGICAL:
        if set(dtypes) != {"bool"}:
            raise ValueError(f"{arg.name} of {', '.join(map(str, kinds))}")
        return TensorType("bool", shape)
    if arg.name == "where":
        if dtypes[0] != "bool" or isinstance(arg.args[0], int | float):
            raise ValueError(f"where by {kinds[0]}, which is no truth value")
        dtypes = dtypes[1:] or ["f32"]
    if len(set(dtypes)) != 1 or (dtypes[0] == "bool" and arg.name != "where"):
        raise ValueError(f"{arg.name} of {', '.join(map(str, kinds))}")
    return TensorType("bool" if arg.name in TRUTHS else dtypes[0], shape)


def _step_type(call: Call, known: dict[str, TensorType]) -> TensorType:
    first = call.args[0]
    x = known[first] if isinstance(first, str) else TensorType("f32", ())
    shape = tuple(int(d) for d in x.shape)
    match call.name, call.args[1:]:
        case (("reshape" | "fill"), sizes):
            if call.name == "reshape" and prod(shape) != prod(sizes):
                raise ValueError(f"{x} has not as many numbers as {list(sizes)}")
            if call.name == "fill" and np.broadcast_shapes(shape, sizes) != sizes:
                raise ValueError(f"{x} does not fill {list(sizes)}")
            return TensorType(x.dtype, sizes)
        case _ if not shape:
            raise ValueError("a row of one number has no axes")
        case (("topk" | "bottomk"), (int() as k,)):
            if not 1 <= k <= shape[-1] or x.dtype != "f32":
                raise ValueError(f"the {k} best of {x}")
            return TensorType("i32", (*shape[:-1], k))
        case "gather", (index,):
            return TensorType(x.dtype, _indices(x, known[index]).shape)
        case "scatter", (index, source):
            _indices(x, known[index])
            if isinstance(source, str) and known[source] != TensorType(x.dtype, known[index].shape):
                raise ValueError(f"{known[source]} is put where {known[index]} says")
            return x
        case "slice", (axis, start, stop, step):
            if not 0 <= axis < len(shape) or not 0 <= start < stop <= shape[axis] or step < 1:
                raise ValueError(f"{start}:{stop}:{step} is no range of axis {axis} of {x}")
            return TensorType(x.dtype, (*shape[:axis], -(-(stop - start) // step), *shape[axis + 1 :]))
        case "concat", _:
            kinds = [known[name] for name in call.args]
            if any((k.dtype, k.shape[:-1]) != (x.dtype, shape[:-1]) or not k.shape for k in kinds):
                raise ValueError(f"{', '.join(map(str, kinds))} do not join")
            return TensorType(x.dtype, (*shape[:-1], sum(int(k.shape[-1]) for k in kinds)))
    if x.dtype != "f32":
        raise ValueError(f"of {x}; expected f32")
    return TensorType("f32", (*shape[:-1], 1))  # a reduction


def _indices(x: TensorType, index: TensorType) -> TensorType:
    if index.dtype != "i32" or index.shape[:-1] != x.shape[:-1] or not index.shape:
        raise ValueError(f"{index} does not index {x}")
    return index


def run(calls: Sequence[Call], inputs: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Every value [count, ...row] by name. `inputs` by name: rows [count, ...], weights [...]."""
    known = {
        name: value if name[0] == "i" else np.broadcast_to(value, (count, *value.shape))
        for name, value in inputs.items()
    }
    with np.errstate(all="ignore"):
        for number, call in enumerate(calls):
            known[f"v{number}"] = _formula(call, known, count) if call.elementwise else _step(call, known, count)
    return known


def _formula(arg: Any, known: dict[str, np.ndarray], count: int) -> np.ndarray:
    if isinstance(arg, str):
        return known[arg]
    values = [np.asarray(a) if isinstance(a, int | float) else _formula(a, known, count) for a in arg.args]
    rank = max(v.ndim for v in values)
    values = [v.reshape(count, *(1,) * (rank - v.ndim), *v.shape[1:]) if v.ndim else v for v in values]
    dtypes = [v.dtype for v, a in zip(values, arg.args, strict=True) if not isinstance(a, int | float)]
    if arg.name in CASTS:
        return values[0].astype(NUMPY_DTYPES[arg.name])
    if arg.name in TRUTHS:
        return np.asarray(TRUTHS[arg.name](*values))
    if arg.name == "where":
        return np.where(*values).astype(dtypes[1] if len(dtypes) > 1 else np.float32)
    return np.asarray(FUNCTIONS[arg.name](*(v.astype(np.float64) for v in values))).astype(dtypes[0])


def _step(call: Call, known: dict[str, np.ndarray], count: int) -> np.ndarray:
    first = call.args[0]
    x = known[first] if isinstance(first, str) else np.full(count, first, np.float32)
    match call.name, call.args[1:]:
        case "reshape", sizes:
            return x.reshape(count, *sizes)
        case "fill", sizes:
            padded = x.reshape(count, *(1,) * (len(sizes) + 1 - x.ndim), *x.shape[1:])
            return np.broadcast_to(padded, (count, *sizes)).copy()
        case (("topk" | "bottomk"), (k,)):
            return top(x, k, call.name == "topk")
        case "gather", (index,):
            return np.take_along_axis(x, known[index], axis=-1)
        case "scatter", (index, source):
            y = x.copy()
            value = known[source] if isinstance(source, str) else np.float32(source)
            np.put_along_axis(y, known[index], np.broadcast_to(value, known[index].shape).astype(y.dtype), axis=-1)
            return y
        case "slice", (axis, start, stop, step):
            return x[(slice(None),) * (axis + 1) + (slice(start, stop, step),)]
        case "concat", _:
            return np.concatenate([known[name] for name in call.args], axis=-1)
    return np.asarray(REDUCTIONS[call.name](x.astype(np.float64), axis=-1, keepdims=True)).astype(np.float32)
