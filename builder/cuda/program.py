"""What lowering for a GPU makes: launches bound to memory, before kernels are compiled.

Comes in: nothing. Goes out: the dataclasses. Must not know: how they are made or compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.artifacts.cuda_program import Address, AllReduce, Argument
from llmc.builder.cuda.variant import Variant
from llmc.builder.ir import Node
from llmc.builder.lowered import Lowered, RankCode
from llmc.plugins.cuda.call import Collective, CudaCall
from llmc.profiles import CudaTarget


@dataclass(frozen=True)
class NodeCalls:
    """A node with its launches and sums over ranks."""

    node: Node
    calls: tuple[CudaCall | Collective, ...]


@dataclass(frozen=True)
class BoundCall:
    """A launch of `node`: `args` in the order of `variant.arguments`. `buffers`: what a pointer may reach from its
    address on, in bytes at the largest step, for each argument that is one.
    """

    node: Node
    call: CudaCall
    variant: Variant
    args: tuple[Argument, ...]
    buffers: tuple[int | None, ...]


@dataclass(frozen=True)
class BoundReduce:
    """A sum over ranks of an output of `node`."""

    node: Node
    what: AllReduce


@dataclass(frozen=True)
class StepCode:
    """The launches of decode steps, or of steps of any mixture, with `least`..`most` tokens and up to `rows` wanted
    rows. `values`: where each computed value lies, and in which dtype.
    """

    decode: bool
    least: int
    most: int
    rows: int
    launches: tuple[BoundCall | BoundReduce, ...]
    arena_bytes: int
    values: Mapping[str, tuple[Address, str]]


@dataclass(frozen=True)
class CudaRank(RankCode):
    """One rank; `constants` are the bytes of the graph's, one behind the other."""

    steps: tuple[StepCode, ...]
    constants: bytes

    @property
    def section(self) -> str:
        """Its program."""
        return f"code/rank{self.rank}.json"

    @property
    def arena_bytes(self) -> int:
        """Of the steps that need most."""
        return max(steps.arena_bytes for steps in self.steps)

    @property
    def operators(self) -> tuple[str, ...]:
        """Those of the steps that have most: times are noted for as many."""
        longest = max(self.steps, key=lambda steps: len(steps.launches))
        return tuple(launch.node.op for launch in longest.launches)


@dataclass(frozen=True)
class CudaLowered(Lowered):
    """All ranks, for one kind of GPU."""

    programs: tuple[CudaRank, ...]
    target: CudaTarget
