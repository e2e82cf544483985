"""From ATen operators that compare, choose, gather and scatter, and from the experts' own, to primitives.

Comes in: an `Emitter` and a traced node's arguments. Goes out: `TABLE`. Must not know: model families.
"""

from __future__ import annotations

from typing import Any

import torch

from llmc.builder.trace.aten import cast
from llmc.builder.trace.emitter import Emitter, Name, Value
from llmc.builder.trace.shapes import cut, reshape
from llmc.builder.trace.table import Table, Translation, entering

TABLE: Table = {}
aten = entering(TABLE)


# -- comparisons


def _operand(e: Emitter, value: Any, dtype: str) -> Name:
    if isinstance(value, Name | torch.Tensor):
        return cast(e, e.value(value), dtype)
    if isinstance(value, int | float):
        return e.scalar(value, dtype)
    raise e.unsupported("it computes with the number of tokens")


def _common(e: Emitter, *values: Any) -> str:
    """The dtype that operands meet in: f32 where one is a float, else i32."""
    dtypes = [e.types[e.value(v)].dtype for v in values if isinstance(v, Name | torch.Tensor)]
    return "f32" if "f32" in dtypes or any(isinstance(v, float) for v in values) else "i32"


def _comparison(op: str) -> Translation:
    def translate(e: Emitter, self: Value, other: Any) -> Value:
        dtype = _common(e, self, other)
        return e.emit(op, [_operand(e, self, dtype), _operand(e, other, dtype)])

    return translate


for _op in ("lt", "le", "gt", "ge", "eq", "ne"):
    TABLE[_op] = _comparison(_op)


def _logical(op: str) -> Translation:
    def translate(e: Emitter, self: Value, other: Value) -> Value:
        return e.emit(op, [_truth(e, self), _truth(e, other)])

    return translate


def _truth(e: Emitter, value: Value) -> Name:
    """The value as bool."""
    x = e.value(value)
    kind = e.types[x].dtype
    return x if kind == "bool" else e.emit("ne", [x, e.scalar(0, kind)])


TABLE["logical_and"] = _logical("logical_and")
TABLE["logical_or"] = _logical("logical_or")


@aten("bitwise_and", "bitwise_or", "__and__", "__or__")
def _bitwise(e: Emitter, self: Value, other: Value) -> Value:
    """Of truth values only."""
    assert e.at is not None
    if e.dtype(e.at.meta["val"].dtype) != "bool":
        raise e.unsupported("bits of integers have no translation")
    name = "logical_and" if "and" in str(e.at.target) else "logical_or"
    return e.emit(name, [_truth(e, self), _truth(e, other)])


@aten("logical_not", "bitwise_not")
def _not(e: Emitter, self: Value) -> Value:
    assert e.at is not None
    if e.dtype(e.at.meta["val"].dtype) != "bool":
        raise e.unsupported("bits of integers have no translation")
    return e.emit("logical_not", [_truth(e, self)])


@aten("where")
def _where(e: Emitter, condition: Value, self: Any = None, other: Any = None) -> Value:
    assert e.at is not None
    if self is None:
        raise e.unsupported("how many entries it finds depends on their values")
    dtype = e.dtype(e.at.meta["val"].dtype)
    return e.emit("where", [_truth(e, condition), _operand(e, self, dtype), _operand(e, other, dtype)])


@aten("masked_fill")
def _masked_fill(e: Emitter, self: Value, mask: Value, value: Any) -> Value:
    x = e.value(self)
    return e.emit("where", [_truth(e, mask), _operand(e, value, e.types[x].dtype), x])


# -- filled tensors


@aten("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zeros", "ones", "full")
def _filled(e: Emitter, fill_value: Any = None, **options: Any) -> Value:
    assert e.at is not None
    kind = e.kind(e.at)
    number = fill_value if fill_value is not None else int("ones" in str(e.at.target))
    if not isinstance(number, int | float):
        raise e.unsupported("it fills with a computed value")
    value = e.scalar(number, kind.dtype)
    return value if not kind.shape else e.emit("broadcast", [value], shape=kind.shape)


@aten("one_hot")
def _one_hot(e: Emitter, self: Value, num_classes: int = -1) -> Value:
    if num_classes < 1:
        raise e.unsupported("the number of classes depends on their values")
    x = e.value(self)
    column = cast(e, reshape(e, x, (*e.types[x].shape, 1), f"{x}.column"), "f32")
    classes = e.value(torch.arange(num_classes, dtype=torch.float32))
    return cast(e, e.emit("eq", [column, classes]), "i32")


# -- choices


@aten("topk")
def _topk(e: Emitter, self: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return _best(e, self, k, dim, largest)


def _best(e: Emitter, value: Value, k: Any, dim: int, largest: bool) -> tuple[Value, Value]:
    """Values and places of the k best of the last axis."""
    x = _last(e, value, dim)
    if not isinstance(k, int):
        raise e.unsupported("how many it chooses depends on the number of tokens")
    index = e.emit("topk", [x], k=k, largest=largest)
    return e.emit("gather", [x, index]), index


def _last(e: Emitter, value: Value, dim: int) -> Name:
    """The value, if `dim` is its last axis."""
    x = e.value(value)
    if dim % e.types[x].rank != e.types[x].rank - 1:
        raise e.unsupported(f"it chooses along axis {dim} of {e.types[x]}, which is not the last")
    return x


@aten("sort", "argsort")
def _sort(e: Emitter, self: Value, dim: int = -1, descending: bool = False, **options: Any) -> Any:
    assert e.at is not None
    size = e.types[_last(e, self, dim)].shape[-1]
    values, places = _best(e, self, size, dim, descending)
    return places if "argsort" in str(e.at.target) else (values, places)


@aten("max.dim", "min.dim", "argmax", "argmin")
def _extreme(e: Emitter, self: Value, dim: int | None = None, keepdim: bool = False) -> Any:
    assert e.at is not None
    if dim is None:
        raise e.unsupported("it chooses among all tokens")
    name = str(e.at.target)
    both = _best(e, self, 1, dim, "max" in name)
    shape = e.types[both[1]].shape if keepdim else e.types[both[1]].shape[:-1]
    values, places = (reshape(e, e.value(v), shape, f"{v}.flat") for v in both)
    return places if "arg" in name else (values, places)


@aten("gather")
def _gather(e: Emitter, self: Value, dim: int, index: Value, **options: Any) -> Value:
    return e.emit("gather", [_last(e, self, dim), e.value(index)])


@aten("scatter")
def _scatter(e: Emitter, self: Value, dim: int, index: Value, src: Value | None = None, value: Any = None) -> Value:
    x, places = _last(e, self, dim), e.value(index)
    if src is None:
        return e.emit("scatter", [x, places, _operand(e, value, e.types[x].dtype)])
    source = e.value(src)
    for axis, size in enumerate(e.types[places].shape):  # PyTorch reads only as much of the source as there are places
        if e.types[source].shape[axis] != size:
            if not isinstance(size, int):
                raise e.unsupported("it cuts the tokens")
            source = cut(e, source, axis, 0, size)
    return e.emit("scatter", [x, places, source])


# -- norms of vectors


@aten("linalg_vector_norm")
def _vector_norm(e: Emitter, self: Value, ord: float = 2, dim: Any = None, keepdim: bool = False,
                 **options: Any) -> Value:  # fmt: skip
    x = e.value(self)
    axes = [dim] if isinstance(dim, int) else list(dim or [])
    if len(axes) != 1 or ord not in (1, 2, float("inf")):
        raise e.unsupported(f"the norm of order {ord} over axes {axes} has no translation")
    size = e.emit("abs" if ord != 2 else "square", [x])
    axis = axes[0] % e.types[x].rank - e.types[x].rank
    total = e.emit("reduce", [size], kind="max" if ord == float("inf") else "sum", axis=axis, keepdim=keepdim)
    return e.emit("sqrt", [total]) if ord == 2 else total


# -- experts


@aten("llmc.grouped_linear")
def _grouped_linear(e: Emitter, x: Value, index: Value, weight: Value, bias: Value | None, mix: Value | None,
                    name: str) -> Value:  # fmt: skip
    """The node's path is that of the parameter: a module has two or more of them."""
    inputs = [e.value(v) for v in (x, index, weight, bias, mix) if v is not None]
    out = e.emit("grouped_linear", inputs, bias=bias is not None, combine=mix is not None)
    node = e.nodes[-1]
    e.nodes[-1] = node.replace(path=f"{node.path}.{name}")
    return out
