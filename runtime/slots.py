"""Which state slots are free: each sequence at work holds one, for the recurrent state that it carries between steps.

Comes in: nothing. Goes out: slot numbers. Must not know: sequences, memory, what a state is. Standard library only.

A slot is not cleared when it changes hands: kernels start from zero where a sequence begins at its first token, and a
sequence that was set back begins there again, or its state is copied into the slot before it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable


class StateSlots:
    """`count` slots, each free or held by one sequence."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} state slots; at least 1 is needed")
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # taken from the end: low numbers first

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A slot for one sequence, its content undefined. Raises IndexError when none is free."""
        if not self._free:
            raise IndexError(f"all {self.count} state slots are held")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Ends the holding of a slot. Raises ValueError for one that nobody holds."""
        if not 0 <= slot < self.count or slot in self._free:
            raise ValueError(f"state slot {slot} is not held")
        self._free.append(slot)

    def check(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless the slots that sequences hold and the free ones are all there are, once each."""
        assert sorted([*held, *self._free]) == list(range(self.count)), "a state slot is lost, or held twice"
