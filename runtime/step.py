"""What one step computes: the only thing that the scheduler gives to the executor.

Comes in: nothing. Goes out: `Chunk`, `Copies`, `StepBatch`. Must not know: sequences, memory. Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Copies:
    """What moves between the pool and host memory before a step, as pairs (number in the pool, place in host memory).

    What goes out goes first: its blocks may be wanted by what comes in.
    """

    blocks_out: list[tuple[int, int]] = field(default_factory=list)
    states_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_in: list[tuple[int, int]] = field(default_factory=list)
    states_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Blocks that move."""
        return len(self.blocks_out) + len(self.blocks_in)

    def extend(self, later: Copies) -> None:
        """Adds what is to be copied after all this."""
        for mine, more in zip(self._kinds(), later._kinds(), strict=True):
            mine += more

    def _kinds(self) -> tuple[list[tuple[int, int]], ...]:
        return self.blocks_out, self.states_out, self.blocks_in, self.states_in

    def __bool__(self) -> bool:
        return bool(self.blocks_out or self.states_out or self.blocks_in or self.states_in)

    def encode(self, most: int) -> Iterator[bytes]:
        """As messages of at most `most` bytes, to be carried out in order: i32 counts of each kind, then the pairs."""
        room = most // 8 - 2
        for kind, pairs in enumerate(self._kinds()):
            for start in range(0, len(pairs), room):
                piece = pairs[start : start + room]
                counts = [0, 0, 0, 0]
                counts[kind] = len(piece)
                yield array("i", [*counts, *(number for pair in piece for number in pair)]).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Copies:
        """One such message."""
        numbers = array("i", data)
        pairs = list(zip(numbers[4::2], numbers[5::2], strict=True))
        lists, start = [], 0
        for count in numbers[:4]:
            lists.append(pairs[start : start + count])
            start += count
        return cls(*lists)


C = TypeVar("C", bound=Chunk)


@dataclass(slots=True)
class StepBatch(Generic[C]):
    """A step's chunks; rows of logits come in their order. `copies` are made before it."""

    chunks: list[C]
    copies: Copies = field(default_factory=Copies)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """S."""
        return sum(chunk.rows for chunk in self.chunks)
