"""What set-back sequences have computed, in host memory: whether to copy it there, where it lies, when it comes back.

Comes in: block tables of sequences that are set back and resumed. Goes out: `Parked`, and copies to be made before the
next step. Must not know: sequences, processes. Standard library only.

A sequence that is set back loses its blocks. Computing them anew costs time by the token; copying them out and back
costs a fixed part and time by the block. Both are measured, and the cheaper way is taken. What comes back is what was
there, bit for bit, and so is what would be computed: the tokens are the same either way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from llmc.runtime.host_memory import HostMemory


@dataclass(slots=True, eq=False)
class Parked:
    """The first `tokens` of a sequence, in places of host memory: `blocks`, and `states` where there is one."""

    tokens: int
    blocks: list[int]
    states: list[int]


class Parking:
    """Sequences in `memory`. `needs_state`: they carry a recurrent state, to be kept too."""

    def __init__(self, memory: HostMemory, block_size: int, *, needs_state: bool = False) -> None:
        self.memory = memory
        self._block_size = block_size
        self._needs_state = needs_state
        self.num_used = 0  # blocks of host memory that are taken
        self.parked = 0  # sequences copied out so far

    def park(self, tokens: int, table: array[int], state_slot: int) -> Parked | None:
        """Takes places for the first `tokens` of a block table, to be copied before the next step; None where there is
        no room, or computing them anew is cheaper.
        """
        count = -(-tokens // self._block_size)
        if not tokens or not self.memory.is_worth(tokens, count, 2):
            return None
        places = self.memory.take(count, int(self._needs_state))
        if places is None:
            return None
        parked = Parked(tokens, *places)
        self.memory.copies.blocks_out += zip(table[:count], parked.blocks, strict=True)
        self.memory.copies.states_out += [(state_slot, place) for place in parked.states]
        self.parked += 1
        self.num_used += count
        return parked

    def restore(self, parked: Parked, table: array[int], first: int, state_slot: int) -> None:
        """Copies back, before the next step, what belongs into a table's blocks from number `first` on."""
        count = len(parked.blocks)
        self.memory.copies.blocks_in += zip(table[first:count], parked.blocks[first:], strict=True)
        self.memory.copies.states_in += [(state_slot, place) for place in parked.states]
        self.drop(parked)

    def drop(self, parked: Parked) -> None:
        """Gives the places back."""
        self.memory.give_back(parked.blocks, parked.states)
        self.num_used -= len(parked.blocks)

    def check(self, parked: Iterable[Parked], shelved: Iterable[int] = ()) -> None:
        """Raises AssertionError unless each place is free, taken once, or one of those that are `shelved`."""
        held = list(parked)
        blocks = [block for one in held for block in one.blocks]
        assert len(blocks) == self.num_used
        self.memory.check([*blocks, *shelved], [state for one in held for state in one.states])
