"""The activations of a kind of steps as a picture: which bytes of the arena each value takes, and for how long.

Comes in: a rank of either kind of target. Goes out: `Picture`s of `Block`s. Must not know: how the places were chosen,
HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmc.artifacts.cuda_program import Address
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.alias import resolve
from llmc.builder.cpu.program import CpuRank, RangeProgram
from llmc.builder.cuda.program import BoundCall, CudaRank, StepCode
from llmc.plugins.cuda.call import Space, Temporary


@dataclass(frozen=True)
class Block:
    """A value: `nbytes` from `offset` on, written by launch `first` and read last by launch `last`."""

    name: str
    path: str
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Picture:
    """The arena of one kind of steps, `steps` in words, over their `launches`."""

    steps: str
    launches: int
    nbytes: int
    blocks: Sequence[Block]


def pictures(program: CpuRank | CudaRank) -> list[Picture]:
    """One for each kind of steps that there is code for."""
    if isinstance(program, CpuRank):
        return [
            Picture(f"steps of {_tokens(r.tokens.min, r.tokens.max)}", len(r.launches), r.arena_bytes,
                    blocks(program, r))
            for r in program.ranges
        ]  # fmt: skip
    return [
        Picture(
            f"{'decode steps' if steps.decode else 'steps of any mixture'} of {_tokens(steps.least, steps.most)}",
            len(steps.launches),
            steps.arena_bytes,
            gpu_blocks(program, steps),
        )
        for steps in program.steps
    ]


def _tokens(least: int, most: int) -> str:
    return f"{least:,} to {most:,} tokens"


def gpu_blocks(program: CudaRank, steps: StepCode) -> list[Block]:
    """Every value of the arena, and what launches of one node share, at the largest step, in the order of writing."""
    aliases, sizes = resolve(program.graph), {"T": steps.most, "S": steps.rows}
    made: dict[str, Block] = {}

    def used(name: str, block: Block) -> None:
        made[name] = replace(made.get(name, block), last=block.last)

    for number, launch in enumerate(steps.launches):
        node = launch.node
        for name in node.inputs:
            if (root := aliases[name].root) in made:
                used(root, replace(made[root], last=number))
        for name, kind in zip(node.outputs, node.types, strict=True):
            place, dtype = steps.values[name]
            if place.space == "arena":
                nbytes = kind.size(**sizes) * NUMPY_DTYPES[dtype].itemsize
                used(name, Block(name, node.path, place.offset, nbytes, number, number))
        if isinstance(launch, BoundCall):
            for parameter, arg, room in zip(launch.variant.arguments, launch.args, launch.buffers, strict=True):
                given = launch.call.args[parameter]
                if isinstance(arg, Address) and arg.space == "arena" and isinstance(given, Temporary | Space):
                    assert room is not None
                    about = f"{given.name if isinstance(given, Temporary) else parameter} of {node.op}"
                    used(f"{about} {node.outputs}", Block(about, node.path, arg.offset, room, number, number))
    return list(made.values())


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
