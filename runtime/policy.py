"""Who is served next: priority classes by weight, and within a class the shortest prompt, but also the oldest.

Comes in: sequences that wait or have a prompt left. Goes out: which of them gets the next tokens. Must not know:
blocks, budgets, time. Standard library only.

Fairness is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): each party's clock advances by what it is given
divided by its weight, the party whose clock is furthest behind is next, and one that comes back from rest starts where
the others are. Two parties that both have work are thus never further apart than one grant each, whatever else comes.
The same rule works twice: between classes, and within a class between two lanes, the shortest prompts first and the
oldest first. A quarter for the oldest is what keeps a long document moving under a stream of short prompts, and three
quarters for the shortest keep short prompts moving beside it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

#: Shares of a class's prompt tokens: shortest first, oldest first.
LANES = {"shortest": 3.0, "oldest": 1.0}


class Waiter(Protocol):
    """What the order looks at."""

    priority: str
    serial: int

    @property
    def remaining(self) -> int:
        """Tokens of its prompt that are still to be computed."""


W = TypeVar("W", bound=Waiter)


class FairShare:
    """Parties by name, each with a weight above 0."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights or min(weights.values()) <= 0:
            raise ValueError(f"weights are {dict(weights)}; there must be some, all above 0")
        self.weights = dict(weights)
        self._clocks = dict.fromkeys(self.weights, 0.0)
        self._now = 0.0

    def pick(self, names: Iterable[str]) -> str:
        """The party of `names`, which are those with work, that is furthest behind; among equals the first declared."""
        wanting = set(names)
        for name in wanting:
            # Whoever rested has not saved anything up.
            self._clocks[name] = max(self._clocks[name], self._now)
        chosen = min((name for name in self._clocks if name in wanting), key=self._clocks.__getitem__)
        self._now = self._clocks[chosen]
        return chosen

    def charge(self, name: str, amount: float) -> None:
        """Notes that a party was given something."""
        self._clocks[name] += amount / self.weights[name]


class Queue(Generic[W]):
    """Who waits, by class: the shortest and the oldest of each are found at once."""

    def __init__(self, classes: Iterable[str]) -> None:
        self._by_length: dict[str, list[tuple[int, int, W]]] = {name: [] for name in classes}
        self._by_age: dict[str, list[tuple[int, int, W]]] = {name: [] for name in self._by_length}

    def __len__(self) -> int:
        return sum(self.sizes().values())

    def __iter__(self) -> Iterator[W]:
        return (waiter for members in self._by_age.values() for *_, waiter in members)

    def sizes(self) -> dict[str, int]:
        """How many wait in each class."""
        return {name: len(members) for name, members in self._by_age.items()}

    def add(self, waiter: W) -> None:
        """Its place is by its `remaining` and `serial` of now; no two have the same serial."""
        remaining, serial = waiter.remaining, waiter.serial
        insort(self._by_length[waiter.priority], (remaining, serial, waiter), key=lambda entry: entry[:2])
        insort(self._by_age[waiter.priority], (serial, remaining, waiter), key=lambda entry: entry[0])

    def remove(self, waiter: W) -> None:
        """Raises ValueError for one that does not wait."""
        age, length = self._by_age[waiter.priority], self._by_length[waiter.priority]
        place = bisect_left(age, waiter.serial, key=lambda entry: entry[0])
        if place == len(age) or age[place][2] is not waiter:
            raise ValueError(f"sequence {waiter.serial} does not wait")
        _, remaining, _ = age.pop(place)
        del length[bisect_left(length, (remaining, waiter.serial), key=lambda entry: entry[:2])]

    def shortest(self, name: str) -> W | None:
        """Of a class, the one with the fewest tokens to compute."""
        members = self._by_length[name]
        return members[0][2] if members else None

    def oldest(self, name: str) -> W | None:
        """Of a class, the one that came first."""
        members = self._by_age[name]
        return members[0][2] if members else None


class Policy(Generic[W]):
    """The order of one scheduler. `weights` name the classes, the first of them being the default one."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._classes = FairShare(weights)
        self._lanes = {name: FairShare(LANES) for name in weights}
        self._turn: tuple[W, str | None] | None = None  # who was chosen last, and by which lane

    @property
    def weights(self) -> Mapping[str, float]:
        """The classes and their weights."""
        return self._classes.weights

    def choose(self, prompts: Iterable[W]) -> W:
        """The one that gets the next tokens; `prompts` must hold the shortest and the oldest of each class with work.

        `charge` says what it was given; without that call it is as if it had not been chosen.
        """
        by_class: dict[str, list[W]] = {}
        for prompt in prompts:
            by_class.setdefault(prompt.priority, []).append(prompt)
        name = self._classes.pick(by_class)
        members = by_class[name]
        shortest = min(members, key=lambda m: (m.remaining, m.serial))
        oldest = min(members, key=lambda m: m.serial)
        # Where both lanes want the same, neither has given the other anything.
        lane = None if shortest is oldest else self._lanes[name].pick(LANES)
        chosen = oldest if lane == "oldest" else shortest
        self._turn = chosen, lane
        return chosen

    def charge(self, prompt: W, tokens: int) -> None:
        """Notes `tokens` of a prompt that was chosen just before, or of a decoding sequence, which has no lane."""
        self._classes.charge(prompt.priority, tokens)
        chosen, lane = self._turn or (None, None)
        if chosen is prompt and lane is not None:
            self._lanes[prompt.priority].charge(lane, tokens)
        self._turn = None

    def standing(self, sequence: Waiter) -> tuple[float, int]:
        """Sorts who keeps its blocks longest to the front: higher classes first, within a class the older."""
        return -self.weights[sequence.priority], sequence.serial
