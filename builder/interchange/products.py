"""Products with weights in ONNX's operators: of all rows, of heads, of experts. Comes in: a `Node`, an `Emitter`. Goes
out: the results' names. Must not know: files, weights' values.

Rounded numbers are Q/DQ: weights E4M3 or INT8 with a scale a row, or UINT4 with a scale and a zero point for every 128
columns; inputs of E4M3 and INT8 weights by a constant scale, or by each row's largest magnitude.
"""

from __future__ import annotations

from llmc.artifacts.types import FP8_MAX, INT4_GROUP, INT8_MAX
from llmc.builder.interchange.emitter import Emitter
from llmc.builder.ir import Node

#: dtype of a weight -> the largest number that inputs beside it are rounded to.
_ROUNDED = {"f8e4m3": FP8_MAX, "i8": INT8_MAX}


def linear(e: Emitter, node: Node) -> list[str]:
    """Raises ValueError for inputs that are rounded already."""
    a, (x, w, *rest) = node.attrs, node.inputs
    weight = _weight(e, w, rest, a.group_start)
    if a.x_factors:
        x = e.op("Mul", x, rest.pop(0))
    x = _rounded(e, x, e.types[w].dtype, a.x_scale, a.x_per_token)
    if a.all_reduce:
        y = e.all_reduce(e.op("Gemm", x, weight, transB=1))
        y = e.op("Add", y, *rest) if rest else y
    else:
        y = e.op("Gemm", x, weight, *rest, transB=1)
    return [e.activated(y, a.epilogue, int(node.type.shape[1]))]


def head_linear(e: Emitter, node: Node) -> list[str]:
    """Each head's own columns times its own matrix."""
    x, w = node.inputs
    heads, size, depth = (int(d) for d in e.types[w].shape)
    split = e.reshape(x, (-1, heads, int(e.types[x].shape[1]) // heads))
    own = e.transpose(e.slice(split, 2, node.attrs.start, node.attrs.start + depth), (1, 0, 2))
    y = e.op("MatMul", own, e.transpose(e.float32(w), (0, 2, 1)))
    return [e.reshape(e.transpose(y, (1, 0, 2)), (-1, heads * size))]


def grouped_linear(e: Emitter, node: Node) -> list[str]:
    """All rows times all experts, of which the chosen are taken: ONNX has no product that picks its matrix by row."""
    a, (x, index, w, *rest) = node.attrs, node.inputs
    _, size, depth = (int(d) for d in e.types[w].shape)
    each, chosen = e.types[x].rank == 3, int(e.types[index].shape[1])
    weight = _weight(e, w, rest, a.group_start)
    bias = rest.pop(0) if a.bias else None
    rows = _rounded(e, e.reshape(x, (-1, depth)) if each else x, e.types[w].dtype, a.x_scale, a.x_per_token)
    first = e.integers([0])
    products = e.op("MatMul", e.op("Unsqueeze", rows, first), e.transpose(weight, (0, 2, 1)))
    zero, one = e.constant(0, "i64"), e.constant(1, "i64")
    number = e.op("Range", zero, e.op("Gather", e.op("Shape", rows), zero), one)  # of each row
    if each:
        number = e.reshape(number, (-1, chosen))
    else:
        number = e.op("Expand", e.op("Unsqueeze", number, e.integers([1])), e.op("Shape", index))
    last = e.integers([-1])
    pairs = [e.op("Unsqueeze", i, last) for i in (e.cast(index, "i64"), number)]
    y = e.op("GatherND", products, e.op("Concat", *pairs, axis=-1))
    if bias is not None:
        y = e.op("Add", y, e.op("Gather", bias, index))
    halves = [e.slice(y, 2, 0, size // 2), e.slice(y, 2, size // 2, size)] if a.gated else [y]
    y = e.formula(a.expr, halves, 3)
    if not a.combine:
        return [y]
    total = e.op("ReduceSum", e.op("Mul", y, e.op("Unsqueeze", rest.pop(0), last)), e.integers([1]), keepdims=0)
    return [e.all_reduce(total) if a.all_reduce else total]


def _weight(e: Emitter, w: str, rest: list[str], group_start: int) -> str:
    """f32[N,K] or [E,N,K]; takes the weight's scales and zero points from `rest`."""
    kind = e.types[w]
    if kind.dtype == "u4":
        if group_start:
            raise ValueError(f"an INT4 weight whose first group is {group_start} columns short has no ONNX form")
        scale, zero = e.cast(rest.pop(0), "f32"), _nibbles(e, rest.pop(0))
        size = min(INT4_GROUP, int(kind.shape[-1]))
        return e.op("DequantizeLinear", _nibbles(e, w), scale, zero, axis=kind.rank - 1, block_size=size)
    if kind.dtype not in _ROUNDED:
        return e.float32(w)
    scale = rest.pop(0)
    if kind.rank == 2:
        return e.op("DequantizeLinear", w, scale, axis=0)
    rows = e.op("DequantizeLinear", e.reshape(w, (-1, int(kind.shape[-1]))), e.reshape(scale, (-1,)), axis=0)
    return e.reshape(rows, [int(d) for d in kind.shape])


def _nibbles(e: Emitter, name: str) -> str:
    """A parameter of 4-bit numbers, which are a byte each in the file where its rows are odd."""
    return e.cast(name, "u4") if int(e.types[name].shape[-1]) % 2 else name


def _rounded(e: Emitter, x: str, dtype: str, scale: float | None, per_token: bool) -> str:
    """x f32[M,K] as numbers of the weight's dtype hold it."""
    if x in e.types and e.types[x].dtype != "f32":
        raise ValueError(f"an input that is {e.types[x].dtype} already has no ONNX form here")
    if scale is None:
        return _rounded_by_row(e, x, dtype) if per_token else x
    most, constant = _ROUNDED[dtype], e.constant(scale, "f32")
    if dtype == "i8":  # which saturates at -128 in ONNX
        x = e.op("Clip", x, e.constant(-most * scale, "f32"), e.constant(most * scale, "f32"))
    return e.op("DequantizeLinear", e.op("QuantizeLinear", x, constant, e.constant(0, dtype)), constant)


def _rounded_by_row(e: Emitter, x: str, dtype: str) -> str:
    most = e.op("ReduceMax", e.op("Abs", x), e.integers([1]), keepdims=0)
    by = e.op("Div", most, e.constant(_ROUNDED[dtype], "f32"))
    by = e.op("Where", e.op("Equal", by, e.constant(0.0, "f32")), e.constant(1.0, "f32"), by)
    zeros = e.op("Expand", e.constant(0, dtype), e.op("Shape", by))
    return e.op("DequantizeLinear", e.op("QuantizeLinear", x, by, zeros, axis=0), by, axis=0)
