"""The activations of one token range as a picture: which bytes of the arena each value takes, and for how long.

Comes in: a `CpuRank` and one of its ranges. Goes out: `Block`s. Must not know: how the places were chosen, HTML.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.builder.cpu.program import CpuRank, RangeProgram


@dataclass(frozen=True)
class Block:
    """A value: `nbytes` from `offset` on, written by launch `first` and read last by launch `last`."""

    name: str
    path: str
    offset: int
    nbytes: int
    first: int
    last: int


def blocks(program: CpuRank, span: RangeProgram) -> list[Block]:
    """Every value of the arena, at the range's largest step, in the order in which they are written."""
    sizes = {"T": span.tokens.max, "S": span.rows}
    made: list[Block] = []
    live: dict[int, int] = {}  # offset -> index of the value that was written there last
    for number, launch in enumerate(span.launches):
        for place in launch.inputs:
            if place.space == "arena":
                at = max(offset for offset in live if offset <= place.offset < offset + made[live[offset]].nbytes)
                old = made[live[at]]
                made[live[at]] = Block(old.name, old.path, old.offset, old.nbytes, old.first, number)
        for name, kind, place in zip(launch.node.outputs, launch.node.types, launch.outputs, strict=True):
            if place.space == "arena":
                live[place.offset] = len(made)
                made.append(Block(name, launch.node.path, place.offset, kind.nbytes(**sizes), number, number))
    return made
