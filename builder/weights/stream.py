"""Executes recipes into a plan's member, a block of rows at a time: memory stays at a few blocks, whatever the model.

Comes in: a `Member`, a source of tensors. Goes out: the member's bytes, in order, into a sink. Must not know: graphs,
kernels, plan files.

A recipe is cut into rows of its result (experts of a stack), and the cut is moved to its leaves, so that only those
rows are read. What the last recipes have read is kept for a while, because a weight and its scales, or two forms of it,
are neighbours.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from llmc.artifacts.errors import CheckpointError
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.weights.errors import ErrorMeter
from llmc.builder.weights.evaluation import apply, infer, read_leaf
from llmc.builder.weights.placement import Member, Placement
from llmc.builder.weights.recipe import (
    Add,
    Buffer,
    Cast,
    Concat,
    Every,
    Fp8,
    Fp8Scale,
    Int4,
    Int4Scale,
    Int4Zero,
    Int8,
    Int8Scale,
    Leaf,
    Load,
    Matrices,
    Mul,
    Nibbles,
    Panels,
    PanelsGated,
    Recipe,
    Reshape,
    Runs,
    Slice,
    Source,
    Stack,
    StoredTensor,
    Swap,
    children,
    leaves,
    parse,
)
from llmc.plugins.cpu.call import PANEL

#: Bytes of float32 that are read at once, and that are kept.
BLOCK = 16 << 20
KEPT = 64 << 20


class Shaped(Source, Protocol):
    """A source that knows shapes without reading."""

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf's value."""


class Sink(Protocol):
    """What bytes are written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Appends bytes."""


def write_weights(
    member: Member,
    source: Shaped,
    sink: Sink,
    done: Callable[[int], None] = lambda count: None,
    block: int = BLOCK,
    meter: ErrorMeter | None = None,
) -> None:
    """Writes all placements and the padding between them; `done` is told how many bytes are written,
    `meter` what is rounded.

    Raises CheckpointError for a tensor that holds NaN or infinity, or that the source cannot read.
    """
    reader = _Reader(source, meter)
    written = 0
    for placement in member.placements:
        sink.write(bytes(placement.offset - written))
        written = placement.offset
        for piece in _pieces(placement, source, reader, block):
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            sink.write(data)
            written += data.nbytes
            done(written)
        if written != placement.offset + placement.nbytes:
            raise AssertionError(f"{placement.recipe}: gives {written - placement.offset} bytes for {placement.kind}")
    sink.write(bytes(member.nbytes - written))


def _pieces(placement: Placement, source: Shaped, reader: _Reader, block: int) -> Iterator[np.ndarray]:
    """The value in pieces whose bytes follow one another."""
    recipe = parse(placement.recipe)
    packed = recipe if isinstance(recipe, Panels | PanelsGated) else None
    inner = packed.source if packed else recipe
    shape = tuple(int(d) for d in infer(inner, source.shape).shape)
    if not shape:
        yield reader.value(inner)
        return
    stack = len(shape) == 3  # of matrices, which are packed each for itself
    gated = isinstance(packed, PanelsGated) and not stack
    count = shape[0] // 2 if gated else shape[0]
    # Blocks end where panels do, whole or halved.
    granule = 1 if stack or not packed else PANEL
    read = sum(4 * math.prod(source.shape(leaf)[1:]) for leaf in set(leaves(inner)))
    row_bytes = max(read, 4 * math.prod(shape[1:]))
    step = max(block // max(row_bytes, 1) // granule, 1) * granule
    for start in range(0, count, step):
        stop = min(start + step, count)
        part = rows(inner, start, stop, source)
        if gated:
            part = Concat(0, (part, rows(inner, count + start, count + stop, source)))
        yield reader.value(dataclasses.replace(packed, source=part) if packed else part)


def rows(recipe: Recipe, start: int, stop: int, source: Shaped) -> Recipe:
    """`slice(recipe, 0, start, stop)` with the cut at the leaves, as far as it goes."""
    shape = infer(recipe, source.shape).shape
    if (start, stop) == (0, shape[0]):
        return recipe
    match recipe:
        case Slice(inner, 0, begin, _):
            return rows(inner, begin + start, begin + stop, source)
        case Runs():
            return _run_rows(recipe, start, stop, source)
        case Slice(inner, _, _, _) | Cast(inner, _) | Add(inner, _) | Mul(inner, _):
            return dataclasses.replace(recipe, source=rows(inner, start, stop, source))
        case Fp8Scale(inner) | Int8Scale(inner) | Int4Scale(inner) | Int4Zero(inner):
            return dataclasses.replace(recipe, source=rows(inner, start, stop, source))
        case Every(inner, axis, _, _) if axis > 0:
            return dataclasses.replace(recipe, source=rows(inner, start, stop, source))
        case Swap(inner, a, b) if 0 not in (a, b):
            return dataclasses.replace(recipe, source=rows(inner, start, stop, source))
        case Matrices(inner, count):
            return Matrices(rows(inner, start * count, stop * count, source), count)
        case Fp8(inner, scale) | Int8(inner, scale):
            return type(recipe)(rows(inner, start, stop, source), rows(scale, start, stop, source))
        case Nibbles(inner):
            return Nibbles(rows(inner, start, stop, source))
        case Int4(inner, scale, zero):
            return Int4(*(rows(part, start, stop, source) for part in (inner, scale, zero)))
        case Stack(sources):
            return Stack(sources[start:stop])
        case Reshape(inner, (count, *_)) if infer(inner, source.shape).shape[0] == count:
            return Reshape(rows(inner, start, stop, source), (stop - start, *recipe.shape[1:]))
        case Reshape(inner, (_, rows_each, *rest)) if infer(inner, source.shape).shape[1:] == tuple(rest):
            part = rows(inner, start * rows_each, stop * rows_each, source)
            return Reshape(part, (stop - start, rows_each, *rest))
        case Concat(0, sources):
            return _concat_rows(sources, start, stop, source)
        case Concat(axis, sources):
            return Concat(axis, tuple(rows(inner, start, stop, source) for inner in sources))
    return Slice(recipe, 0, start, stop)


def _run_rows(recipe: Runs, start: int, stop: int, source: Shaped) -> Recipe:
    """A piece of each run that the rows lie in."""
    parts = []
    for run in range(start // recipe.width, -(-stop // recipe.width)):
        begin = recipe.start + run * recipe.stride
        low, high = max(start - run * recipe.width, 0), min(stop - run * recipe.width, recipe.width)
        parts.append(rows(recipe.source, begin + low, begin + high, source))
    return parts[0] if len(parts) == 1 else Concat(0, tuple(parts))


def _concat_rows(sources: tuple[Recipe, ...], start: int, stop: int, source: Shaped) -> Recipe:
    parts, begin = [], 0
    for inner in sources:
        end = begin + int(infer(inner, source.shape).shape[0])
        if start < end and stop > begin:
            parts.append(rows(inner, max(start - begin, 0), min(stop, end) - begin, source))
        begin = end
    return parts[0] if len(parts) == 1 else Concat(0, tuple(parts))


class _Reader:
    """Evaluates recipes; keeps what it has read of tensors, up to `KEPT` bytes."""

    def __init__(self, source: Source, meter: ErrorMeter | None) -> None:
        self._source, self._meter = source, meter
        self._kept: OrderedDict[Recipe, np.ndarray] = OrderedDict()
        self._size = 0

    def value(self, recipe: Recipe) -> np.ndarray:
        """The recipe's value; parts that occur twice are computed once."""
        return self._value(recipe, {})

    def _value(self, recipe: Recipe, known: dict[Recipe, np.ndarray]) -> np.ndarray:
        if recipe not in known:
            match recipe:
                case Load() | StoredTensor() | Buffer() | Slice(Load() | StoredTensor(), 0, _, _):
                    known[recipe] = self._read(recipe)
                case _:
                    values = [self._value(child, known) for child in children(recipe)]
                    known[recipe] = apply(recipe, values)
                    if self._meter:
                        self._meter.step(recipe, values, known[recipe])
        return known[recipe]

    def _read(self, recipe: Recipe) -> np.ndarray:
        if recipe in self._kept:
            self._kept.move_to_end(recipe)
            return self._kept[recipe]
        match recipe:
            case Slice(Load() | StoredTensor() as leaf, _, start, stop):
                value = read_leaf(leaf, self._source, start, stop)
            case Load() | StoredTensor() | Buffer() as leaf:
                value = read_leaf(leaf, self._source)
        numbers = not isinstance(leaf, Buffer) and value.dtype not in (NUMPY_DTYPES["u4"], NUMPY_DTYPES["i8"])
        if numbers and not np.isfinite(value).all():
            raise CheckpointError(
                f"tensor {leaf.name!r} holds NaN or infinity: no engine can be built from it. The checkpoint is "
                "damaged, or was saved from a run that diverged"
            )
        self._kept[recipe] = value
        self._size += value.nbytes
        while self._size > KEPT and len(self._kept) > 1:
            self._size -= self._kept.popitem(last=False)[1].nbytes
        return value
