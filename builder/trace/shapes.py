"""From ATen operators that move or rename elements to primitives.

Comes in: an `Emitter` and a traced node's arguments. Goes out: `TABLE`, `reshape`, `cut`. Must not know: families.
Whatever would cut, pick or repeat single tokens raises UnsupportedError: tokens of a step are ragged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmc.artifacts.types import Dim
from llmc.builder.trace.emitter import Emitter, Name, Value
from llmc.builder.trace.table import Table, entering

TABLE: Table = {}
aten = entering(TABLE)


def reshape(e: Emitter, x: Name, shape: tuple[Dim, ...], stem: str | None = None) -> Name:
    """The value in another shape; itself where it has that already."""
    return x if e.types[x].shape == shape else e.emit("reshape", [x], stem, shape=shape)


@aten("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
def _view(e: Emitter, self: Value, **options: Any) -> Value:
    assert e.at is not None
    x = e.value(self)
    return reshape(e, x, e.regrouped(e.types[x].shape, e.at.meta["val"]))


@aten("expand", "expand_as", "broadcast_to")
def _expand(e: Emitter, self: Value, **options: Any) -> Value:
    assert e.at is not None
    x, shape = e.value(self), e.kind(e.at).shape
    return x if e.types[x].shape == shape else e.emit("broadcast", [x], shape=shape)


@aten("repeat")
def _repeat(e: Emitter, self: Value, repeats: Sequence[Any]) -> Value:
    x = e.value(self)
    x = reshape(e, x, (1,) * (len(repeats) - e.types[x].rank) + e.types[x].shape)
    for axis, times in reversed(list(enumerate(repeats))):
        shape = e.types[x].shape
        if not isinstance(times, int):
            raise e.unsupported("it repeats something as often as there are tokens")
        if times != 1 and isinstance(shape[axis], str):  # all tokens, then all of them again: an axis before them
            apart = reshape(e, x, (*shape[:axis], 1, *shape[axis:]))
            x = e.emit("broadcast", [apart], shape=(*shape[:axis], times, *shape[axis:]))
        elif times != 1:
            x = e.emit("concat", [x] * times, axis=axis)
    return x


@aten("repeat_interleave.self_int")
def _repeat_interleave(e: Emitter, self: Value, repeats: int, dim: int | None = None, **options: Any) -> Value:
    x = e.value(self)
    shape = e.types[x].shape
    if dim is None or not isinstance(repeats, int) or isinstance(shape[dim], str):
        raise e.unsupported("only an axis of fixed size can be repeated")
    axis = dim % len(shape)
    apart = reshape(e, x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = e.emit("broadcast", [apart], shape=(*shape[: axis + 1], repeats, *shape[axis + 1 :]))
    return reshape(e, wide, (*shape[:axis], _number(shape[axis]) * repeats, *shape[axis + 1 :]))


def _number(dim: Dim) -> int:
    assert isinstance(dim, int)
    return dim


@aten("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T", "mT")
def _permute(e: Emitter, self: Value, dims: Sequence[int] | None = None, dim0: int | None = None,
             dim1: int | None = None, **options: Any) -> Value:  # fmt: skip
    x = e.value(self)
    rank = e.types[x].rank
    perm = list(range(rank))
    if dims is not None:
        perm = [d % rank for d in dims]
    elif dim0 is not None and dim1 is not None:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    elif rank == 2 and not options:
        perm = [1, 0]
    else:
        raise e.unsupported("this order of axes has no translation")
    turned = e.transposed(x) if perm == [1, 0] else None
    return turned or (x if perm == sorted(perm) else e.emit("transpose", [x], perm=tuple(perm)))


@aten("cat", "concat", "concatenate")
def _cat(e: Emitter, tensors: Sequence[Value], dim: int = 0) -> Value:
    values = [e.value(t) for t in tensors if not _is_empty(t)]
    return values[0] if len(values) == 1 else e.emit("concat", values, axis=dim)


def _is_empty(value: Value) -> bool:
    """Whether it is what is left of an axis where nothing is left; only joins can take that."""
    return isinstance(value, torch.Tensor) and value.numel() == 0


@aten("stack")
def _stack(e: Emitter, tensors: Sequence[Value], dim: int = 0) -> Value:
    values = [e.value(t) for t in tensors]
    shape = e.types[values[0]].shape
    axis = dim % (len(shape) + 1)
    return e.emit("concat", [reshape(e, v, (*shape[:axis], 1, *shape[axis:])) for v in values], axis=axis)


@aten("slice")
def _slice(e: Emitter, self: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    x = e.value(self)
    shape = e.types[x].shape
    axis, size = dim % len(shape), shape[dim]
    if isinstance(size, str):
        assert e.at is not None
        if step == 1 and e.kind(e.at).shape == shape:  # 0:, or the last T of T
            return x
        raise e.unsupported("it cuts the tokens")
    low, high, _ = slice(start, end, step).indices(size)
    if low >= high:
        return torch.empty(0)
    return cut(e, x, axis, low, high, step)


def cut(e: Emitter, x: Name, axis: int, start: int, stop: int, step: int = 1) -> Name:
    """Entries start:stop:step of an axis: the value itself where that is all of them, of a concat the part in which
    they lie.
    """
    if (start, stop, step) == (0, e.types[x].shape[axis], 1):
        return x
    for part, first in e.parts(x, axis):
        if first <= start and stop <= first + _number(e.types[part].shape[axis]):
            return cut(e, part, axis, start - first, stop - first, step)
    return e.emit("slice", [x], axis=axis, start=start, stop=stop, step=step)


@aten("new_empty", "empty_like", "new_zeros", "zeros_like", "new_ones", "ones_like")
def _filled(e: Emitter, self: Value, **options: Any) -> Value:
    """One number everywhere: zero also where the model leaves open what is there, and fills it then."""
    assert e.at is not None
    kind = e.kind(e.at)
    return e.emit("broadcast", [e.scalar("ones" in str(e.at.target), kind.dtype)], shape=kind.shape)


@aten("copy")
def _copy(e: Emitter, self: Value, src: Value, non_blocking: bool = False) -> Value:
    """`src` in the shape of what it overwrites."""
    assert e.at is not None
    x, kind = e.value(src), e.kind(e.at)
    if e.types[x].dtype != kind.dtype:
        x = e.emit("cast", [x], dtype=kind.dtype)
    return x if e.types[x].shape == kind.shape else e.emit("broadcast", [x], shape=kind.shape)


@aten("slice_scatter")
def _slice_scatter(e: Emitter, self: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None,
                   step: int = 1) -> Value:  # fmt: skip
    """`self` with entries start:end:step of an axis replaced: what `src` has, and between it what was there."""
    x = e.value(self)
    axis, size = dim % e.types[x].rank, e.types[x].shape[dim]
    if isinstance(size, str):
        raise e.unsupported("it writes to single tokens")
    return _overwritten(e, x, e.value(src), axis, range(size)[slice(start, end, step)])


@aten("select_scatter")
def _select_scatter(e: Emitter, self: Value, src: Value, dim: int, index: Any) -> Value:
    """`self` with one entry of an axis replaced."""
    x = e.value(self)
    shape = e.types[x].shape
    axis, size = dim % len(shape), shape[dim]
    if isinstance(size, str) or not isinstance(index, int):
        raise e.unsupported("it writes to single tokens")
    entry = reshape(e, e.value(src), (*shape[:axis], 1, *shape[axis + 1 :]))
    return _overwritten(e, x, entry, axis, range(size)[index % size : index % size + 1])


def _overwritten(e: Emitter, x: Name, src: Name, axis: int, places: range) -> Name:
    """The value where entry places[i] of an axis is entry i of `src`: a join of what lies together in either."""
    if not places:
        return x
    if places.step == 1:
        runs, behind = [src], places.stop
    else:
        runs, behind = [], places[0]
        for index, place in enumerate(places):
            runs += [cut(e, x, axis, behind, place)] if behind < place else []
            runs.append(cut(e, src, axis, index, index + 1))
            behind = place + 1
    size = _number(e.types[x].shape[axis])
    parts = [cut(e, x, axis, 0, places[0])] if places[0] else []
    parts += [*runs, *([cut(e, x, axis, behind, size)] if behind < size else [])]
    return parts[0] if len(parts) == 1 else e.emit("concat", parts, axis=axis)


@aten("select.int")
def _select(e: Emitter, self: Value, dim: int, index: Any) -> Value:
    assert e.at is not None
    x = e.value(self)
    shape = e.types[x].shape
    size = shape[dim]
    if isinstance(size, str) or not isinstance(index, int):
        raise e.unsupported("it picks single tokens")
    piece = cut(e, x, dim % len(shape), index % size, index % size + 1)
    return reshape(e, piece, e.kind(e.at).shape)


@aten("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "tensor_split")
def _split(e: Emitter, self: Value, dim: int = 0, **options: Any) -> tuple[Value, ...]:
    """Consecutive pieces, as wide as the tracer found them."""
    assert e.at is not None
    x = e.value(self)
    axis, start, pieces = dim % e.types[x].rank, 0, []
    dropped = str(e.at.target).split(".")[1] == "unbind"
    for piece in e.at.meta["val"]:
        width = 1 if dropped else piece.shape[axis]
        if not isinstance(width, int):
            raise e.unsupported("it divides the tokens")
        part = cut(e, x, axis, start, start + width)
        pieces.append(reshape(e, part, e.shape(piece)))
        start += width
    return tuple(pieces)
