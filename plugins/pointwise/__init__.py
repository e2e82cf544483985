"""pointwise: any formula of elementwise functions over broadcast inputs, in one pass over memory.

Comes in: inputs i0, i1, ... and a formula. Goes out: one f32 tensor. Must not know: builder, runtime.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.pointwise.functions import ARITY, FUNCTIONS


@dataclass(frozen=True)
class Attrs:
    """`expr`: calls of the names in `functions.py` on i0, i1, ... and numbers: "mul(i0, sigmoid(i1))"; "i0" alone
    turns integers into f32.
    """

    expr: str


def visit(
    expr: str, leaf: Callable[[int], object], number: Callable[[float], object], call: Callable[..., object]
) -> object:
    """Folds an expression: `leaf(input)`, `number(value)`, `call(name, *operands)`; raises ValueError with a reason."""

    def fold(node: ast.expr) -> object:
        match node:
            case ast.Name(id=name) if name[:1] == "i" and name[1:].isdigit():
                return leaf(int(name[1:]))
            case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
                return number(float(value))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
                return number(-float(value))
            case ast.Name(id="inf" | "nan" as name):
                return number(float(name))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return number(-float("inf"))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                arity = ARITY.get(name)
                if arity is None:
                    raise ValueError(f"{name} in {expr!r} is not an elementwise function")
                if arity != len(args):
                    raise ValueError(f"{name} in {expr!r} takes {arity} operands, not {len(args)}")
                return call(name, *(fold(a) for a in args))
        raise ValueError(f"{ast.unparse(node)!r} in {expr!r} is neither an input, a number nor a call")

    try:
        tree = ast.parse(expr, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"expr {expr!r} is no expression: {error.msg}") from error
    return fold(tree.body)


def used_inputs(expr: str) -> set[int]:
    """The numbers of the inputs that an expression reads."""
    found: set[int] = set()
    visit(expr, found.add, lambda value: None, lambda name, *operands: None)
    return found


def _broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    out: list[Dim] = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, dim in enumerate(shape, len(out) - len(shape)):
            if dim not in (1, out[i]) and out[i] != 1:
                raise ValueError(f"shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
            out[i] = out[i] if dim == 1 else dim
    return tuple(out)


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x0, x1, ... f32 or i32, broadcast as numpy does -> f32."""
    if not types or any(t.dtype not in ("f32", "i32") for t in types):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected f32 or i32")
    if used_inputs(attrs.expr) != set(range(len(types))):
        raise ValueError(f"expr {attrs.expr!r} does not read exactly the inputs i0..i{len(types) - 1}")
    return (TensorType("f32", _broadcast([t.shape for t in types])),)


def evaluate(expr: str, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """An expression's value: each function in float64, each result rounded to float32."""

    def call(name: str, *operands: np.ndarray) -> np.ndarray:
        wide = [np.asarray(o).astype(np.float64) for o in operands]
        return np.asarray(FUNCTIONS[name](*wide)).astype(np.float32)

    values = [np.asarray(x).astype(np.float32) for x in inputs]
    with np.errstate(all="ignore"):
        result = visit(expr, lambda i: values[i], np.float32, call)
    return np.asarray(np.broadcast_to(np.asarray(result), np.broadcast_shapes(*(v.shape for v in values))))


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The expression's value; nothing else."""
    return (evaluate(attrs.expr, inputs),)


OPERATOR = Operator("pointwise", Attrs, infer, reference)
