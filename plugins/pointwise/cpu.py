"""How the cpu target calls pointwise: the formula becomes a C++ struct, which the driver in cpu.h applies.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.cpu.call import (
    C_TYPES,
    Arg,
    Call,
    CpuCall,
    KernelEnv,
    Literal,
    Pointer,
    Product,
    Side,
    Simple,
    row_stride,
    strided_rows,
)
from llmc.plugins.pointwise import Attrs, visit

MAX_RANK = 4
#: pow with these exponents is one of the cheaper functions.
_POWERS = {2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
_INFINITY = {True: "__builtin_inff()", False: "-__builtin_inff()"}


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Matrices, the output too, may have a row stride."""
    (y,) = outputs
    if y.rank > MAX_RANK:
        raise UnsupportedError(f"{attrs.expr}: the cpu target computes tensors of at most {MAX_RANK} axes, not {y}")
    struct, prelude = formula_struct(attrs.expr, len(inputs))
    inner = "".join(f", {int(bool(x.shape) and x.shape[-1] != 1)}" for x in inputs)
    dims: tuple[Dim, ...] = (1,) * (MAX_RANK - y.rank) + y.shape
    return CpuCall(
        header="plugins/pointwise/cpu.h",
        function=f"pointwise<{struct}{inner}>",
        prelude=prelude,
        args=(
            *(Product((d,)) for d in dims),
            Pointer("out", 0),
            *_strides("out", 0, y, y),
            *(_operand(i, x, y) for i, x in enumerate(inputs)),
        ),
        strided=strided_rows(inputs) | (frozenset({Pointer("out", 0)}) if y.rank == 2 else frozenset()),
    )


def _operand(index: int, x: TensorType, y: TensorType) -> Arg:
    return Call(f"pw::Operand<{C_TYPES[x.dtype]}>", (Pointer("in", index), *_strides("in", index, x, y)))


def _strides(side: Side, index: int, x: TensorType, y: TensorType) -> list[Simple]:
    """Elements between entries of the first three of four axes of y, in x."""
    strides: list[Simple] = []
    for axis in range(MAX_RANK - 1):
        own = axis - (MAX_RANK - x.rank)
        if own < 0 or x.shape[own] == 1 or own == x.rank - 1:
            strides.append(Literal("0"))
        elif x.rank == 2:
            strides.append(row_stride(side, index, x))
        else:
            strides.append(Product(x.shape[own + 1 :]))
    return strides


def float_text(value: float) -> str:
    """A number rounded to float32, in C++."""
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if math.isnan(value):
        return '__builtin_nanf("")'
    return f"{value.hex()}f" if math.isfinite(value) else _INFINITY[value > 0]


def formula_struct(expr: str, inputs: int) -> tuple[str, str]:
    """The name and the text of a C++ struct whose `f` computes an expression of i0, i1, ... on lanes."""
    body = _formula(expr)
    names = ", ".join(f"Lanes i{i}" for i in range(inputs))
    struct = f"Formula{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    return struct, f"struct {struct} {{\n  static Lanes f({names}) {{ return {body}; }}\n}};"


def _formula(expr: str) -> str:
    """C++ for an expression."""
    numbers: dict[str, float] = {}

    def number(value: float) -> str:
        text = f"fn::number({float_text(value)})"
        numbers[text] = value
        return text

    def call(name: str, *operands: str) -> str:
        power = _POWERS.get(numbers.get(operands[-1], 0.0)) if name == "pow" else None
        return f"fn::{power}({operands[0]})" if power else f"fn::{name}({', '.join(operands)})"

    return str(visit(expr, lambda i: f"i{i}", number, call))
