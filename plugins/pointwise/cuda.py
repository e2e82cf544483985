"""How the cuda targets call pointwise: the formula becomes a kernel made of the functions in kernels.py.

Comes in: attributes and types. Goes out: `CudaCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride, Side
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product
from llmc.plugins.cuda.rows import power_of_two, row_count, warps_of
from llmc.plugins.pointwise import Attrs, visit

#: Columns of one program, at most.
_COLUMNS = 1024
#: pow with these exponents is one of the cheaper functions.
_POWERS = {2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}


@dataclass
class Functions:
    """Writes calls, and notes which functions of kernels.py they need."""

    used: set[str] = field(default_factory=set)

    def call(self, name: str, *operands: str) -> str:
        """The text of a call."""
        self.used.add(name)
        return f"{name}({', '.join(operands)})"

    def imports(self) -> str:
        """The import that the calls need; empty without any."""
        return f"from llmc.plugins.pointwise.kernels import {', '.join(sorted(self.used))}\n" if self.used else ""


def number(value: float, block: str = "BLOCK") -> str:
    """A block of numbers, each `value` rounded to float32, in Triton."""
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full([{block}], {text}, tl.float32)"


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each row and piece of columns. Raises UnsupportedError where an axis but the first is symbolic."""
    (y,) = outputs
    if y.rank == 1 and isinstance(y.shape[0], str):  # a number for each token: rows of one column
        y, inputs = _column(y), [_column(x) if x.rank else x for x in inputs]
    if any(isinstance(d, str) for d in y.shape[1:]):
        raise UnsupportedError(f"{attrs.expr}: {y} has a symbolic axis that is not its first")
    args: dict[str, Arg] = {"y": Pointer("out", 0)}
    loads = []
    for index, x in enumerate(inputs):
        args[f"p{index}"] = Pointer("in", index)
        place = _place(f"p{index}", "in", index, x, y, args)
        loads.append(f"    x{index} = tl.load({place}, mask=inside, other=0).to(tl.float32)")
    store = _place("y", "out", 0, y, y, args)
    width = int(y.shape[-1]) if y.rank else 1
    block = min(_COLUMNS, power_of_two(width))
    return (
        CudaCall(
            kernel="pointwise:formula",
            args=args,
            constexprs={"BLOCK": block},
            grid=((row_count(y),), (Product((width,), block),)),
            num_warps=warps_of(block),
            source=_source(attrs.expr, y, width, list(args), loads, store),
        ),
    )


def _column(x: TensorType) -> TensorType:
    return TensorType(x.dtype, (*x.shape, 1))


def _place(name: str, side: Side, index: int, x: TensorType, y: TensorType, args: dict[str, Arg]) -> str:
    """Text of where x's numbers lie for row a0, a1, ... of y and its columns; adds the stride of a matrix to `args`."""
    terms = [name]
    lead = y.rank - x.rank
    for own in range(x.rank - 1):
        if x.shape[own] == 1:
            continue
        stride = str(prod(int(d) for d in x.shape[own + 1 :]))
        if x.rank == 2:
            stride = f"{name}_stride"
            args[stride] = RowStride(side, index)
        terms.append(f"a{own + lead} * {stride}")
    terms.append("columns" if x.rank and x.shape[-1] != 1 else "columns * 0")
    return " + ".join(terms)


def formula(expr: str, leaf: Callable[[int], str], block: str = "BLOCK") -> tuple[str, str]:
    """Triton's text of an expression of blocks, `leaf` names input i's, and the import that it needs."""
    functions = Functions()

    def text(operand: object) -> str:
        return number(operand, block) if isinstance(operand, float) else str(operand)

    def call(name: str, *operands: object) -> str:
        if name == "pow" and isinstance(operands[1], float) and operands[1] in _POWERS:
            return functions.call(_POWERS[operands[1]], text(operands[0]))
        return functions.call(name, *map(text, operands))

    value = text(visit(expr, leaf, float, call))
    return value, functions.imports()


def _source(expr: str, y: TensorType, width: int, params: Sequence[str], loads: Sequence[str], store: str) -> str:
    value, imports = formula(expr, "x{}".format)
    axes, rest = [], "row"
    for axis in range(y.rank - 2, 0, -1):
        axes.append(f"    a{axis} = {rest} % {y.shape[axis]}")
        rest = f"({rest} // {y.shape[axis]})"
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        imports,
        "",
        "@triton.jit",
        f"def formula({', '.join(params)}, BLOCK: tl.constexpr):",
        "    row = tl.program_id(0).to(tl.int64)",
        "    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
        f"    inside = columns < {width}",
        *axes,
        f"    a0 = {rest}",
        *loads,
        f"    value = {value}",
        f"    tl.store({store}, value.to(y.dtype.element_ty), mask=inside)",
        "",
    ]
    return "\n".join(lines)
