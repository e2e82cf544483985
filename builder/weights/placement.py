"""Where weights stand in the plan: each stored form once, in the member of its rank or in the one that all ranks map.

Comes in: what each rank's kernels read. Goes out: `Member`s, and a place for every stored form. Must not know: how
recipes are executed, graphs, kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.artifacts.types import TensorType
from llmc.builder.weights.evaluation import infer
from llmc.builder.weights.recipe import parse

#: Every weight starts on a cache line.
ALIGN = 64


@dataclass(frozen=True)
class Placement:
    """A weight as the plan stores it: `recipe` gives a value of type `kind`, written at `offset` (bytes, a multiple of
    64) of its member. `path`: the first module that reads it.
    """

    recipe: str
    kind: TensorType
    offset: int
    path: str

    @property
    def nbytes(self) -> int:
        """Without the padding behind it."""
        return self.kind.nbytes()


@dataclass(frozen=True)
class Member:
    """Weights that stand in one member of the plan, by offset."""

    placements: tuple[Placement, ...]
    nbytes: int


@dataclass(frozen=True)
class Stored:
    """A parameter as a kernel reads it: `recipe` with its packing, the type of that, a module that reads it."""

    recipe: str
    kind: TensorType
    path: str


def stored_form(recipe: str, kind: TensorType, packing: str | None, path: str) -> Stored:
    """`packing` is a recipe with `{}` in the place of the parameter's own; None: stored as it is."""
    if packing is None:
        return Stored(recipe, kind, path)
    shape = tuple(int(d) for d in kind.shape)
    packed = infer(parse(packing.format(f"stored('x', '{kind.dtype}')")), lambda leaf: shape)
    return Stored(packing.format(recipe), packed, path)


def place(ranks: Sequence[Sequence[Stored]]) -> tuple[tuple[Member, ...], Member]:
    """One member a rank, and the shared one: what all of several ranks store alike. In the order of first use."""
    tables = [{s.recipe: s for s in reversed(stored)} for stored in ranks]
    common = set.intersection(*map(set, tables)) if len(tables) > 1 else set()
    members = tuple(
        _member([table[r] for r in _order(stored) if r not in common])
        for table, stored in zip(tables, ranks, strict=True)
    )
    return members, _member([tables[0][r] for r in _order(ranks[0]) if r in common])


def _order(stored: Sequence[Stored]) -> list[str]:
    return list(dict.fromkeys(s.recipe for s in stored))


def _member(stored: Sequence[Stored]) -> Member:
    placements, offset = [], 0
    for entry in stored:
        placements.append(Placement(entry.recipe, entry.kind, offset, entry.path))
        offset += -(-entry.kind.nbytes() // ALIGN) * ALIGN
    return Member(tuple(placements), offset)


def offsets(member: Member, shared: Member) -> dict[str, tuple[str, int]]:
    """Recipe -> the space that it lies in, a rank's weights or those of all, and where in it."""
    spaces = {"weights": member, "shared": shared}
    return {p.recipe: (space, p.offset) for space, member in spaces.items() for p in member.placements}
