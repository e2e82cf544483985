"""How the cpu target calls copy.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.copy import Attrs
from llmc.plugins.cpu.call import (
    C_TYPES,
    Arg,
    CpuCall,
    KernelEnv,
    Literal,
    Pointer,
    Product,
    row_stride,
    strided_rows,
)

MAX_RANK = 4


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Inputs that are matrices may have a row stride."""
    (y,) = outputs
    concat = attrs.kind == "concat"
    args = _concat(attrs, inputs, y) if concat else _strided(attrs, inputs[0], y)
    return CpuCall(
        header="plugins/copy/cpu.h",
        function=f"{'concat' if concat else 'copy'}<{C_TYPES[y.dtype]}>",
        args=args,
        strided=strided_rows(inputs) if not concat or _by_columns(attrs, y) else frozenset(),
    )


def _by_columns(attrs: Attrs, x: TensorType) -> bool:
    """Whether a concat of matrices sets rows side by side, which may be rows with a stride."""
    return x.rank == 2 and attrs.axis in (1, -1)


def _concat(attrs: Attrs, inputs: Sequence[TensorType], y: TensorType) -> tuple[Arg, ...]:
    """Everything before the axis is rows, the axis and what follows is columns."""
    axis = attrs.axis % y.rank
    args: list[Arg] = [Product(y.shape[:axis]), Pointer("out", 0), Product(y.shape[axis:])]
    for i, x in enumerate(inputs):
        stride = row_stride("in", i, x) if _by_columns(attrs, x) else Product(x.shape[axis:])
        args += [Pointer("in", i), stride, Product(x.shape[axis:])]
    return tuple(args)


def _strided(attrs: Attrs, x: TensorType, y: TensorType) -> tuple[Arg, ...]:
    """The output's axes and, for each, how far apart its elements lie in the input."""
    if y.rank > MAX_RANK:
        raise UnsupportedError(f"copy of {x} to {y}: the cpu target moves tensors of at most {MAX_RANK} axes")
    strides: list[Arg] = [Product(x.shape[i + 1 :]) for i in range(x.rank)]
    if x.rank == 2:
        strides[0] = row_stride("in", 0, x)
    lead = MAX_RANK - y.rank
    axis, start, step = 0, 0, 1
    if attrs.kind == "transpose":
        strides = [strides[i] for i in attrs.perm]
    elif attrs.kind == "broadcast":
        own: tuple[Dim, ...] = (1,) * (y.rank - x.rank) + x.shape
        strides = [*[Literal("0")] * (y.rank - x.rank), *strides]
        strides = [Literal("0") if d == 1 else s for d, s in zip(own, strides, strict=True)]
    else:
        axis, start, step = attrs.axis % x.rank + lead, attrs.start, attrs.step
    dims = [Product((d,)) for d in (*(1,) * lead, *y.shape)]
    cut = [Literal(str(value)) for value in (axis, start, step)]
    return (Pointer("out", 0), *dims, Pointer("in", 0), *[Literal("0")] * lead, *strides, *cut)
