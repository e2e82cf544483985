"""Places in host memory for blocks and recurrent states that are out of the pool, and whether copying is worth while.

Comes in: who takes and gives back places, what is to be copied, times of copies and steps. Goes out: numbers of places,
the `Copies` of the next step, seconds. Must not know: whose content it is. Standard library only.

A step's copies are made out first and then in, so a place that is copied from must not be filled by the same step: a
place that was given back is free from the next `settle` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llmc.runtime.step import Copies

#: Weight of the latest measurement.
_NEWEST = 0.1
#: Blocks of the larger of the two first copies that are timed.
_PROBE = 64
#: So often each is timed.
_PROBES = 5


class HostMemory:
    """`blocks` and `states` places. `reclaim` is asked for places when none is free, and says how many it gave back."""

    def __init__(self, blocks: int, states: int = 0) -> None:
        self.num_blocks, self.num_states = blocks, states
        self.reclaim: Callable[[int], list[int]] = lambda count: []
        self.copies = Copies()
        self._free = list(range(blocks - 1, -1, -1))
        self._free_states = list(range(states - 1, -1, -1))
        self._used: tuple[list[int], list[int]] = [], []  # given back, but perhaps to be copied from still
        self._coming: set[int] = set()  # places that copies will fill which are not made yet
        self._fixed = self._each = 0.0  # seconds of a copy, and of each block in it
        self._token: float | None = None  # seconds that computing a prompt's token takes

    # Places

    @property
    def num_free(self) -> int:
        """Places for blocks that nobody has."""
        return len(self._free)

    def take(self, blocks: int, states: int = 0) -> tuple[list[int], list[int]] | None:
        """So many places, or None if there are not so many."""
        if states > len(self._free_states):
            return None
        if blocks > len(self._free):
            self._free += self.reclaim(blocks - len(self._free))
        if blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(blocks)], [self._free_states.pop() for _ in range(states)]

    def give_back(self, blocks: Iterable[int], states: Iterable[int] = ()) -> None:
        """What is copied from these places by the step being composed still is."""
        self._used[0].extend(blocks)
        self._used[1].extend(states)

    def settle(self) -> None:
        """A new step is composed: what the last one copies is not touched by it any more."""
        self._free += self._used[0]
        self._free_states += self._used[1]
        self._used = [], []
        self._coming = {place for _, place in self.copies.blocks_out}

    def copy_out(self, block: int, place: int) -> None:
        """Copies a block of the pool to a place before the next step."""
        self.copies.blocks_out.append((block, place))
        self._coming.add(place)

    def is_coming(self, place: int) -> bool:
        """Whether a place is to be filled by copies that are not made yet, so that nobody may read or fill it now."""
        return place in self._coming

    def take_copies(self) -> Copies:
        """What has to be copied before the next step; the caller sees to it."""
        copies, self.copies = self.copies, Copies()
        return copies

    def check(self, blocks: Iterable[int], states: Iterable[int] = ()) -> None:
        """Raises AssertionError unless each place is free or one of these, once."""
        all_blocks = [*blocks, *self._free, *self._used[0]]
        assert sorted(all_blocks) == list(range(self.num_blocks)), "a place in host memory is lost"
        all_states = [*states, *self._free_states, *self._used[1]]
        assert sorted(all_states) == list(range(self.num_states)), "a state's place is lost"

    # What it costs

    def probe(self, copy: Callable[[Copies], float], pool_blocks: int) -> None:
        """Measures what copies cost, by making some before anything is in the pool; `copy` returns the seconds."""
        many = min(_PROBE, self.num_blocks, pool_blocks)
        if many < 2:
            return
        one, all_ = [(0, 0)], [(block, block) for block in range(many)]
        copy(Copies(blocks_out=all_))  # the first touches memory that is not there yet
        # The least of several: a busy machine makes one of them look dear.
        few, most = (min(copy(Copies(blocks_out=pairs)) for _ in range(_PROBES)) for pairs in (one, all_))
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

    def is_worth(self, tokens: int, blocks: int, copies: int, beside: float = 0.0) -> bool:
        """Whether copying blocks so many times, and `beside` that so many seconds, is cheaper than computing their
        tokens anew; so long as that is not known, it counts so.
        """
        return self._token is None or copies * (self._fixed + blocks * self._each) + beside < tokens * self._token
