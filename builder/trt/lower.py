"""From fused graphs to what a plan with TensorRT engines says before they are built.

Comes in: one graph per rank, a shape profile, a target. Goes out: `TrtLowered`. Reads no weights and needs no TensorRT.
Must not know: networks.

The weights of a rank are in its engine: the section with the engine is the one with the weights, and nothing else is
stored. How much memory activations take is known when the engine is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.trt_program import ALIGN
from llmc.builder.cuda.cache_layout import kv_table
from llmc.builder.cuda.lower import COMM_BYTES
from llmc.builder.ir import Graph
from llmc.builder.lowered import Lowered, RankCode, columns_of
from llmc.builder.trt.engine import require_layers
from llmc.builder.trt.operators import LAYERS
from llmc.builder.trt.paged_cache import OPERATORS
from llmc.builder.weights.placement import Member
from llmc.profiles import TensorRtTarget


@dataclass(frozen=True)
class TrtRank(RankCode):
    """One rank. In bytes, 0 where it is not built yet: the engine, and what it needs for activations."""

    engine_bytes: int = 0
    context_bytes: int = 0

    @property
    def section(self) -> str:
        """What surrounds the engine."""
        return f"code/rank{self.rank}.json"

    @property
    def weights_section(self) -> str:
        """The engine."""
        return f"code/rank{self.rank}.engine"

    @property
    def weights_bytes(self) -> int:
        """Of the whole engine."""
        return self.engine_bytes

    @property
    def arena_bytes(self) -> int:
        """Of an execution context."""
        return self.context_bytes

    @property
    def operators(self) -> tuple[str, ...]:
        """All of a step is one launch."""
        return ("engine",)


@dataclass(frozen=True)
class TrtLowered(Lowered):
    """All ranks, for one kind of GPU."""

    programs: tuple[TrtRank, ...]
    target: TensorRtTarget


def lower(
    graphs: Sequence[Graph],
    profile: ShapeProfile,
    target: TensorRtTarget,
    kv_dtype: str,
    vocab: Sequence[tuple[int, int]],
) -> TrtLowered:
    """`vocab`: (first column, columns) of each rank's logits. Raises UnsupportedError for what has no layers."""
    nothing = Member((), 0)
    written, vocab_size = columns_of(vocab)
    programs = []
    for graph, columns in zip(graphs, written, strict=True):
        require_layers(graph, (*LAYERS, *OPERATORS))
        kv_layers, kv_block_bytes = kv_table(graph, profile.block_size, kv_dtype, target, ALIGN)
        programs.append(TrtRank(graph, nothing, kv_layers, kv_block_bytes, (), 0, columns))
    comm = COMM_BYTES if len(graphs) > 1 else 0
    return TrtLowered(tuple(programs), nothing, comm, vocab_size, profile, target, kv_dtype)
