"""Recipes of parts: rows or columns of a weight, with the cut moved towards the leaves.

Comes in: a recipe, what is wanted of its value. Goes out: a recipe of that. Must not know: graphs, passes, kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llmc.builder.weights.recipe import (
    Add,
    Cast,
    Concat,
    Fp8,
    Fp8Scale,
    Int4,
    Int4Scale,
    Int4Zero,
    Int8,
    Int8Scale,
    Matrices,
    Mul,
    Recipe,
    Runs,
    Slice,
    Stack,
    Swap,
    Transpose,
)


def sliced(recipe: Recipe, axis: int, start: int, stop: int, rank: int = 2) -> Recipe:
    """`slice(recipe, ...)`, moved as near to the leaves as it goes, so that streaming reads only what it needs. `rank`
    is that of the weight (of a scale: of the weight that it scales).

    A row's scale stays the scale of the whole row when columns are cut, and a group's INT4 scale that of the whole
    group: a shard quantizes like the whole.
    """
    match recipe:
        case Slice(source, inner, begin, _) if inner == axis:
            return sliced(source, axis, begin + start, begin + stop, rank)
        case Runs(source, begin, _, width, stride) if axis == 0 and start % width == 0 and stop % width == 0:
            first, count = start // width, (stop - start) // width
            if count == 1:
                return sliced(source, 0, begin + first * stride, begin + first * stride + width, rank)
            return Runs(source, begin + first * stride, count, width, stride)
        case Runs() if axis > 0:
            return dataclasses.replace(recipe, source=sliced(recipe.source, axis, start, stop, rank))
        case Cast() | Add() | Mul():
            return dataclasses.replace(recipe, source=sliced(recipe.source, axis, start, stop, rank))
        case Stack(sources) if axis == 0:
            return Stack(sources[start:stop])
        case Stack(sources):
            return Stack(tuple(sliced(source, axis - 1, start, stop, rank - 1) for source in sources))
        case Transpose(source):
            return Transpose(sliced(source, 1 - axis, start, stop))
        case Swap(source, a, b):
            return Swap(sliced(source, {a: b, b: a}.get(axis, axis), start, stop, rank), a, b)
        case Matrices(source, rows) if axis == 0:
            return Matrices(sliced(source, 0, start * rows, stop * rows), rows)
        case Fp8(source, scale) | Int8(source, scale):
            cut = sliced(scale, axis, start, stop, rank) if axis < rank - 1 else scale
            return type(recipe)(sliced(source, axis, start, stop, rank), cut)
        case Fp8Scale(source) | Int8Scale(source) if axis < rank - 1:
            return dataclasses.replace(recipe, source=sliced(source, axis, start, stop, rank))
        case Int4(source, scale, zero) if axis < rank - 1:
            return Int4(*(sliced(part, axis, start, stop, rank) for part in (source, scale, zero)))
        case Int4Scale(source) | Int4Zero(source) if axis < rank - 1:
            return dataclasses.replace(recipe, source=sliced(source, axis, start, stop, rank))
    return Slice(recipe, axis, start, stop)


def picked(recipe: Recipe, rows: Sequence[int]) -> Recipe:
    """Those rows (axis 0) of a recipe, in that order: a slice, runs, or a concatenation of them. Rounded rows keep
    the scales that they have.
    """
    match recipe:
        case Int4(source, scale, zero):
            return Int4(*(picked(part, rows) for part in (source, scale, zero)))
        case Cast() | Add() | Mul() | Fp8Scale() | Int8Scale() | Int4Scale() | Int4Zero():
            return dataclasses.replace(recipe, source=picked(recipe.source, rows))
        case Fp8(source, scale) | Int8(source, scale):
            return type(recipe)(picked(source, rows), picked(scale, rows))
    parts = [
        sliced(recipe, 0, start, start + width) if count == 1 else Runs(recipe, start, count, width, stride)
        for start, count, width, stride in _regular(rows)
    ]
    return parts[0] if len(parts) == 1 else Concat(0, tuple(parts))


def _regular(rows: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(start, count, width, stride) of the fewest regular groups, taken greedily, that the rows follow."""
    stretches: list[list[int]] = []
    for row in rows:
        if stretches and row == sum(stretches[-1]):
            stretches[-1][1] += 1
        else:
            stretches.append([row, 1])
    groups: list[tuple[int, int, int, int]] = []
    for start, width in stretches:
        first, count, same, stride = groups[-1] if groups else (0, 0, 0, 0)
        step = start - first if count == 1 else stride
        if count and width == same and step >= width and start == first + count * step:
            groups[-1] = (first, count + 1, width, step)
        else:
            groups.append((start, 1, width, width))
    return groups
