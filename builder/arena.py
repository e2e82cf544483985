"""Where activations lie: the pass "plan memory". Values whose lives do not overlap share memory.

Comes in: each value's size and life. Goes out: `Arena`: an offset for each, and the size of the whole. Must not know:
graphs, kernels.

The largest values are placed first, each at the lowest offset where it meets no value that lives at the same time. That
is within a few percent of the least possible for networks of layers, and depends on nothing but the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Every value starts on a cache line.
ALIGN = 64


@dataclass(frozen=True)
class Life:
    """A value of `nbytes` that launch number `first` writes and launch number `last` is the last to read."""

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        """Whether both are needed during one launch. A launch never writes over what it reads."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """`offsets` by name and `nbytes` of the whole, all multiples of ALIGN."""

    offsets: Mapping[str, int]
    nbytes: int


def aligned(nbytes: int, boundary: int = ALIGN) -> int:
    """The next multiple of `boundary`."""
    return -(-nbytes // boundary) * boundary


def plan_memory(lives: Iterable[Life]) -> Arena:
    """Places every value. The same lives, in any order, give the same plan."""
    placed: list[tuple[Life, int]] = []
    for life in sorted(lives, key=lambda v: (-v.nbytes, v.first, v.name)):
        taken = sorted((offset, offset + aligned(other.nbytes)) for other, offset in placed if life.meets(other))
        offset = 0
        for start, end in taken:
            if offset + aligned(life.nbytes) <= start:
                break
            offset = max(offset, end)
        placed.append((life, offset))
    total = max((offset + aligned(life.nbytes) for life, offset in placed), default=0)
    return Arena({life.name: offset for life, offset in placed}, total)
