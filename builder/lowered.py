"""What every target's lowering makes, as far as plans, weights and memory arithmetic ask.

Comes in: nothing. Goes out: `RankCode`, `Lowered`, of which each target has its own kinds; `columns_of`. Must not know:
targets, kernels, how anything is lowered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llmc.artifacts.schema import KVLayer, RankProgram, ShapeProfile, StateLayer
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph
from llmc.builder.weights.placement import Member
from llmc.plugins.cpu.call import Scratch
from llmc.profiles import TargetDescription


def columns_of(vocab: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """`vocab`: (first column, columns) of the logits that each rank computes -> those that it writes, and all
    columns. Where every rank computes the whole vocabulary, the first one's is taken.
    """
    split = len({first for first, _ in vocab}) == len(vocab)
    written = [columns if split or rank == 0 else (0, 0) for rank, columns in enumerate(vocab)]
    return written, max(first + count for first, count in vocab)


@dataclass(frozen=True)
class RankCode(ABC):
    """One rank. `vocab`: first column and number of the logits that this rank writes; 0 where another rank does."""

    graph: Graph
    weights: Member
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
    @abstractmethod
    def section(self) -> str:
        """The section of the plan that its code stands in."""

    @property
    def weights_section(self) -> str:
        """The section that its weights stand in."""
        return f"weights/rank{self.rank}.bin"

    @property
    def weights_bytes(self) -> int:
        """Its weights alone, without those that all ranks share."""
        return self.weights.nbytes

    @property
    @abstractmethod
    def arena_bytes(self) -> int:
        """Activations of the largest step."""

    @property
    @abstractmethod
    def operators(self) -> tuple[str, ...]:
        """The operator of each launch of a step, in order; where steps differ, of one that has most."""

    @property
    def scratch(self) -> Scratch:
        """What launches need that does not stand among the activations."""
        return Scratch()


@dataclass(frozen=True)
class Lowered:
    """All ranks. `shared`: weights that every rank reads; `comm_bytes`: memory that ranks share."""

    programs: Sequence[RankCode]
    shared: Member
    comm_bytes: int
    vocab_size: int
    profile: ShapeProfile
    target: TargetDescription
    kv_dtype: str


def rank_program(program: RankCode, launches_per_layer: float) -> RankProgram:
    """What the manifest says of a rank."""
    return RankProgram(
        rank=program.rank,
        code=program.section,
        weights=program.weights_section,
        graph=f"graph/rank{program.rank}.ir",
        weights_bytes=program.weights_bytes,
        arena_bytes=program.arena_bytes,
        kv_block_bytes=program.kv_block_bytes,
        kv_layers=program.kv_layers,
        vocab_start=program.vocab[0],
        vocab_size=program.vocab[1],
        launches=len(program.operators),
        launches_per_layer=launches_per_layer,
        state_slot_bytes=program.state_slot_bytes,
        state_layers=program.state_layers,
    )
