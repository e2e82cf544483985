"""Host memory for what set-back sequences have computed: whether to copy it there, where it lies, when it comes back.

Comes in: block tables of sequences that are set back and resumed, times of copies and steps. Goes out: `Parked`, and
the `Copies` that have to be made before the next step. Must not know: sequences, processes. Standard library only.

A sequence that is set back loses its blocks. Computing them anew costs time by the token; copying them out and back
costs a fixed part and time by the block. Both are measured, and the cheaper way is taken. What comes back is what was
there, bit for bit, and so is what would be computed: the tokens are the same either way.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmc.runtime.step import Copies

#: Weight of the latest measurement.
_NEWEST = 0.1
#: Blocks of the larger of the two first copies that are timed.
_PROBE = 64


@dataclass(slots=True, eq=False)
class Parked:
    """The first `tokens` of a sequence, in places of host memory: `blocks`, and `state` where there is one (or -1)."""

    tokens: int
    blocks: list[int]
    state: int


class Parking:
    """`blocks` and `states` places of host memory. `needs_state`: sequences carry a recurrent state, to be kept too."""

    def __init__(self, blocks: int, states: int, block_size: int, *, needs_state: bool = False) -> None:
        self.num_blocks = blocks
        self._block_size = block_size
        self._needs_state = needs_state
        self._free = list(range(blocks - 1, -1, -1))
        self._states = list(range(states - 1, -1, -1))
        self._num_states = states
        self._copies = Copies()
        self._fixed = self._each = 0.0  # seconds of a copy, and of each block in it
        self._token: float | None = None  # seconds that computing a prompt's token takes
        self.parked = 0  # sequences copied out so far

    @property
    def num_used(self) -> int:
        """Blocks of host memory that are taken."""
        return self.num_blocks - len(self._free)

    # What it costs

    def probe(self, copy: Callable[[Copies], float], pool_blocks: int) -> None:
        """Measures what copies cost, by making some before anything is in the pool; `copy` returns the seconds."""
        many = min(_PROBE, self.num_blocks, pool_blocks)
        if many < 2:
            return
        one, all_ = [(0, 0)], [(block, block) for block in range(many)]
        copy(Copies(blocks_out=all_))  # the first touches memory that is not there yet
        few, most = copy(Copies(blocks_out=one)), copy(Copies(blocks_out=all_))
        self._each = max(most - few, 0.0) / (many - 1)
        self._fixed = max(few - self._each, 0.0)

    def observe_copy(self, blocks: int, seconds: float) -> None:
        """Takes in a copy of so many blocks."""
        self._each += (max(seconds - self._fixed, 0.0) / max(blocks, 1) - self._each) * _NEWEST

    def observe_step(self, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """Takes in a step; it tells what a prompt's token costs if it consisted mostly of them."""
        if 2 * prompt_tokens > tokens:
            each = seconds / tokens
            self._token = each if self._token is None else self._token + (each - self._token) * _NEWEST

    def is_worth(self, tokens: int, blocks: int) -> bool:
        """Whether copying out and back is cheaper than computing anew; so long as that is not known, it counts so."""
        return self._token is None or 2 * (self._fixed + blocks * self._each) < tokens * self._token

    # What lies where

    def park(self, tokens: int, table: array[int], state_slot: int) -> Parked | None:
        """Takes places for the first `tokens` of a block table, to be copied before the next step; None where there is
        no room, or computing them anew is cheaper.
        """
        count = -(-tokens // self._block_size)
        states = int(self._needs_state)
        if count > len(self._free) or states > len(self._states) or not tokens or not self.is_worth(tokens, count):
            return None
        parked = Parked(tokens, [self._free.pop() for _ in range(count)], self._states.pop() if states else -1)
        self._copies.blocks_out += zip(table[:count], parked.blocks, strict=True)
        if states:
            self._copies.states_out.append((state_slot, parked.state))
        self.parked += 1
        return parked

    def restore(self, parked: Parked, table: array[int], first: int, state_slot: int) -> None:
        """Copies back, before the next step, what belongs into a table's blocks from number `first` on."""
        count = len(parked.blocks)
        self._copies.blocks_in += zip(table[first:count], parked.blocks[first:], strict=True)
        if parked.state != -1:
            self._copies.states_in.append((state_slot, parked.state))
        self.drop(parked)

    def drop(self, parked: Parked) -> None:
        """Gives the places back. What is copied from them before the next step still is."""
        self._free += parked.blocks
        if parked.state != -1:
            self._states.append(parked.state)

    def take_copies(self) -> Copies:
        """What has to be copied before the next step; the caller sees to it."""
        copies, self._copies = self._copies, Copies()
        return copies

    def check(self, parked: Iterable[Parked]) -> None:
        """Raises AssertionError unless each place is free or taken once."""
        held = list(parked)
        blocks = [block for one in held for block in one.blocks]
        assert sorted([*blocks, *self._free]) == list(range(self.num_blocks)), "a place in host memory is lost"
        states = [one.state for one in held if one.state != -1]
        assert sorted([*states, *self._states]) == list(range(self._num_states)), "a state's place is lost"
