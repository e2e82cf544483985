"""Who waits for admission, whose turn it is, and who has to go.

Comes in: `Sequence`s that wait, times. Goes out: who may be admitted next, who is turned away. Must not know: blocks,
steps. Standard library only.

One that was chosen and did not fit is remembered as next. Only higher classes may pass it then, by as many tokens as
their weight allows them for its own; after that nobody is admitted before it, so no one is passed over for ever. One
whose turn it is may have to wait for a disk: it stands aside meanwhile, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from llmc.runtime.admission import Patience
from llmc.runtime.core_sequence import Sequence
from llmc.runtime.policy import Queue


class Waiting:
    """The sequences that hold no blocks, the preempted included. `weights` are the priority classes."""

    def __init__(self, weights: Mapping[str, float], patience: Patience) -> None:
        self._weights = weights
        self._patience = patience
        self._queue: Queue[Sequence] = Queue(weights)
        self._aside: set[Sequence] = set()
        self._passed = 0  # tokens of those who were admitted before `next` since it is that
        self.next: Sequence | None = None

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        yield from self._aside

    @property
    def num_aside(self) -> int:
        """How many wait for the disk."""
        return len(self._aside)

    def sizes(self) -> dict[str, int]:
        """How many wait, by class."""
        sizes = self._queue.sizes()
        for sequence in self._aside:
            sizes[sequence.priority] += 1
        return sizes

    def add(self, sequence: Sequence) -> None:
        """One more waits."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """One has ended."""
        if sequence in self._aside:
            self._aside.remove(sequence)
            return
        self._queue.remove(sequence)
        if sequence is self.next:
            self.next = None

    def set_aside(self, sequence: Sequence) -> None:
        """One has to wait for the disk before it can be admitted."""
        self.remove(sequence)
        self._aside.add(sequence)

    def call_back(self, sequences: Iterable[Sequence]) -> None:
        """Some have waited for the disk."""
        for sequence in sequences:
            self._aside.remove(sequence)
            self._queue.add(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """One that was chosen does not fit: it is next, unless somebody else is."""
        if self.next is None:
            self.next, self._passed = sequence, 0

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """One leaves to have so many tokens computed."""
        if self.next is not None and sequence is not self.next:
            self._passed += tokens
        self.remove(sequence)

    def candidates(self, name: str) -> Iterator[Sequence]:
        """Of a class, who may be admitted: the shortest and the oldest."""
        for waiter in (self._queue.shortest(name), self._queue.oldest(name)):
            if waiter is not None and self._may_pass(waiter):
                yield waiter

    def _may_pass(self, waiter: Sequence) -> bool:
        if self.next is None:
            return True
        ratio = self._weights[waiter.priority] / self._weights[self.next.priority]
        return ratio > 1 and self._passed < ratio * self.next.remaining

    def impatient(self, now: float) -> list[Sequence]:
        """Those that have waited too long, then the youngest of those for whom the queue is too short; each gets its
        `cause`. Who waits for the disk counts as well; whoever was at work already stays.
        """
        oldest = [s.arrived for name in self._weights if (s := self._queue.oldest(name)) is not None]
        if not self._patience.is_tried(len(self), [*oldest, *(s.arrived for s in self._aside)], now):
            return []
        new = sorted((s for s in self if s.admitted is None), key=lambda s: s.serial)
        late, many = self._patience.split([s.arrived for s in new], now)
        turned = new[:late] + new[len(new) - many :]
        for place, sequence in enumerate(turned):
            sequence.cause = "queue_timeout" if place < late else "queue_full"
        return turned
