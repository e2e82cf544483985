"""What lowering makes: plain data that code, weights and memory arithmetic are written from.

Comes in: nothing. Goes out: the dataclasses. Must not know: how they are made or emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.artifacts.schema import TokenRange
from llmc.builder.ir import Node
from llmc.builder.lowered import Lowered, RankCode
from llmc.plugins.cpu.call import CpuCall, Scratch


@dataclass(frozen=True)
class Place:
    """A value's first element lies `offset` bytes behind the start of `space`; its rows lie `stride` elements apart.

    A space is mapped weights (weights, shared), activations (arena), one of the step's arrays (ids, positions, rows,
    logits), or const: a constant that stands in the code; the offset is then its number.
    """

    space: str
    offset: int
    stride: int


@dataclass(frozen=True)
class Launch:
    """A kernel call of `node`; `inputs` and `outputs` say where its values lie."""

    node: Node
    call: CpuCall
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


@dataclass(frozen=True)
class RangeProgram:
    """The launches of steps with `tokens.min`..`tokens.max` tokens and up to `rows` wanted rows."""

    tokens: TokenRange
    rows: int
    launches: tuple[Launch, ...]
    arena_bytes: int


@dataclass(frozen=True)
class CpuRank(RankCode):
    """One rank. `constants` are numbered as they stand; `needs`: the scratch of its neediest launch."""

    ranges: tuple[RangeProgram, ...]
    constants: tuple[Node, ...]
    needs: Scratch

    @property
    def section(self) -> str:
        """Its shared object."""
        return f"code/rank{self.rank}.so"

    @property
    def arena_bytes(self) -> int:
        """Of the range that needs most."""
        return max(r.arena_bytes for r in self.ranges)

    @property
    def operators(self) -> tuple[str, ...]:
        """Those of the first range."""
        return tuple(launch.node.op for launch in self.ranges[0].launches)

    @property
    def scratch(self) -> Scratch:
        """What the neediest launch of any range needs."""
        return self.needs


@dataclass(frozen=True)
class CpuLowered(Lowered):
    """All ranks. `slot_bytes`: the largest partial of an all-reduce."""

    programs: tuple[CpuRank, ...]
    slot_bytes: int
