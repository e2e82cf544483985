"""What lowering makes: plain data that code, weights and memory arithmetic are written from.

Comes in: nothing. Goes out: the dataclasses. Must not know: how they are made or emitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llmc.artifacts.schema import KVLayer, RankProgram, ShapeProfile, StateLayer, TokenRange
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.weights.placement import Member
from llmc.plugins.cpu.call import CpuCall, Scratch
from llmc.profiles import TargetDescription


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
class Program:
    """One rank. `vocab`: first column and number of the logits that this rank writes; 0 where another rank does."""

    graph: Graph
    ranges: tuple[RangeProgram, ...]
    weights: Member
    constants: tuple[Node, ...]
    scratch: Scratch
    kv_layers: tuple[KVLayer, ...]
    kv_block_bytes: int
    state_layers: tuple[StateLayer, ...]
    state_slot_bytes: int
    vocab: tuple[int, int]

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Every value's type."""
        return self.graph.types()

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.graph.rank

    @property
    def arena_bytes(self) -> int:
        """Of the range that needs most."""
        return max(r.arena_bytes for r in self.ranges)


@dataclass(frozen=True)
class Lowered:
    """All ranks. `shared`: weights that every rank reads. `slot_bytes`: the largest partial of an all-reduce."""

    programs: tuple[Program, ...]
    shared: Member
    slot_bytes: int
    comm_bytes: int
    vocab_size: int
    profile: ShapeProfile
    target: TargetDescription
    kv_dtype: str


def rank_program(program: Program, launches_per_layer: float) -> RankProgram:
    """What the manifest says of a rank."""
    return RankProgram(
        rank=program.rank,
        code=f"code/rank{program.rank}.so",
        weights=f"weights/rank{program.rank}.bin",
        graph=f"graph/rank{program.rank}.ir",
        weights_bytes=program.weights.nbytes,
        arena_bytes=program.arena_bytes,
        kv_block_bytes=program.kv_block_bytes,
        kv_layers=program.kv_layers,
        vocab_start=program.vocab[0],
        vocab_size=program.vocab[1],
        launches=len(program.ranges[0].launches),
        launches_per_layer=launches_per_layer,
        state_slot_bytes=program.state_slot_bytes,
        state_layers=program.state_layers,
    )
