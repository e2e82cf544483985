"""What one step computes: the only thing that the scheduler gives to the executor.

Comes in: nothing. Goes out: `Chunk`, `StepBatch`. Must not know: sequences, memory. Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence. Both arrays have typecode 'i'.

    `tokens` stand at positions start, start + 1, ...; `blocks` is the sequence's block table, long enough for them;
    logits are wanted for the last `rows` of them; `state_slot` holds its recurrent state, where the model has one.
    """

    tokens: array[int]
    start: int
    blocks: array[int]
    rows: int
    state_slot: int


C = TypeVar("C", bound=Chunk)


@dataclass(slots=True)
class StepBatch(Generic[C]):
    """A step's chunks; rows of logits come in their order."""

    chunks: Sequence[C]

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """S."""
        return sum(chunk.rows for chunk in self.chunks)
