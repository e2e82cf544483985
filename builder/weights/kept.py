"""A weight that is put together from tensors which are FP8 already: the same of their bytes, and of their scales.

Comes in: a weight's recipe, what the checkpoint stores of the tensors that it loads. Goes out: a recipe of its E4M3
bytes and one of its scales, or None. Must not know: graphs, checkpoints.

Each row keeps its own scale, so whatever moves rows (and picks columns) keeps the stored numbers; what computes with
them, or puts rows of several scales side by side, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmc.builder.weights.recipe import Concat, Every, Load, Matrices, Recipe, Runs, Slice, Stack, StoredTensor, Swap


@dataclass(frozen=True)
class Kept:
    """`weight` E4M3 of `rank` axes, `scale` f32 of all of them but the last."""

    weight: Recipe
    scale: Recipe
    rank: int = 2


def keep(recipe: Recipe, scales: Mapping[str, str]) -> Kept | None:
    """`scales`: the scale tensor of each matrix that is stored in E4M3. None where the recipe also loads others, or
    does something that scales cannot follow.
    """
    match recipe:
        case Load(name) if name in scales:
            return Kept(StoredTensor(name, "f8e4m3"), StoredTensor(scales[name], "f32"))
        case Stack(sources) | Concat(_, sources):
            return _joined(recipe, [keep(source, scales) for source in sources])
        case Slice(source) | Every(source) | Swap(source) | Runs(source) | Matrices(source):
            inner = keep(source, scales)
            return None if inner is None else _moved(recipe, inner)
    return None


def _joined(recipe: Stack | Concat, found: list[Kept | None]) -> Kept | None:
    parts = [part for part in found if part is not None]
    rank = parts[0].rank if parts else 0
    if len(parts) < len(found) or (isinstance(recipe, Concat) and recipe.axis == rank - 1):
        return None
    weights, scales = (tuple(getattr(part, name) for part in parts) for name in ("weight", "scale"))
    rank += isinstance(recipe, Stack)
    return Kept(replace(recipe, sources=weights), replace(recipe, sources=scales), rank)


def _moved(recipe: Slice | Every | Swap | Runs | Matrices, inner: Kept) -> Kept | None:
    weight, columns = replace(recipe, source=inner.weight), inner.rank - 1
    match recipe:
        case Slice(_, axis) | Every(_, axis) if axis == columns:
            return Kept(weight, inner.scale, inner.rank)
        case Swap(_, a, b) if columns in (a, b):
            return None
    return Kept(weight, replace(recipe, source=inner.scale), inner.rank + isinstance(recipe, Matrices))
