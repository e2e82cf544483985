"""A weight that is put together from tensors which are FP8 or INT4 already: the same of their numbers and scales.

Comes in: a weight's recipe, what the checkpoint stores of the tensors that it loads. Goes out: recipes of its numbers,
of its scales and (of INT4) of its zero points, or None. Must not know: graphs, checkpoints.

Each row keeps its own scales, so whatever moves rows (and, where a row has one scale, picks columns) keeps the stored
numbers; what computes with them, or puts rows of several scales side by side, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmc.builder.weights.recipe import Concat, Every, Load, Matrices, Recipe, Runs, Slice, Stack, StoredTensor, Swap


@dataclass(frozen=True)
class Kept:
    """`weight`: numbers of `rank` axes. `others`: of E4M3 scales f32, by all of these axes but the last; of INT4 scales
    f16 and zero points u4, by groups of the last.
    """

    weight: Recipe
    others: tuple[Recipe, ...]
    rank: int = 2


def keep(recipe: Recipe, stored: Mapping[str, tuple[StoredTensor, ...]]) -> Kept | None:
    """`stored`: of each matrix that is stored in E4M3 or INT4, its numbers and what belongs to them (see `Kept`). None
    where the recipe also loads others, or does something that scales cannot follow.
    """
    match recipe:
        case Load(name) if name in stored:
            weight, *others = stored[name]
            return Kept(weight, tuple(others))
        case Stack(sources) | Concat(_, sources):
            return _joined(recipe, [keep(source, stored) for source in sources])
        case Slice(source) | Every(source) | Swap(source) | Runs(source) | Matrices(source):
            inner = keep(source, stored)
            return None if inner is None else _moved(recipe, inner)
    return None


def _joined(recipe: Stack | Concat, found: list[Kept | None]) -> Kept | None:
    parts = [part for part in found if part is not None]
    rank = parts[0].rank if parts else 0
    if len(parts) < len(found) or (isinstance(recipe, Concat) and recipe.axis == rank - 1):
        return None
    weight = replace(recipe, sources=tuple(part.weight for part in parts))
    others = zip(*(part.others for part in parts), strict=True)
    return Kept(weight, tuple(replace(recipe, sources=other) for other in others), rank + isinstance(recipe, Stack))


def _moved(recipe: Slice | Every | Swap | Runs | Matrices, inner: Kept) -> Kept | None:
    weight, columns = replace(recipe, source=inner.weight), inner.rank - 1
    match recipe:
        case Slice(_, axis) | Every(_, axis) if axis == columns:
            return Kept(weight, inner.others, inner.rank) if len(inner.others) == 1 else None
        case Swap(_, a, b) if columns in (a, b):
            return None
    others = tuple(replace(recipe, source=other) for other in inner.others)
    return Kept(weight, others, inner.rank + isinstance(recipe, Matrices))
