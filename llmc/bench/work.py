"""What is timed, and what came out: works, repeated runs of several systems in turn, medians and spread.

Comes in: `System`s and `Work`s. Goes out: a `Timing` for each pair. Must not know: engines, peers, machines.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmc.bench.machine import Memory

#: Tokens that a sequence holds in decodes at several batch sizes.
SHORT_CONTEXT = 128


def prompt(count: int, vocab: int) -> array[int]:
    """Token ids without a pattern that a model could profit from, the same for every system, of typecode 'i'."""
    return array("i", (3 + i * 7919 % (vocab - 3) for i in range(count)))


@dataclass(frozen=True)
class Work:
    """`kind` "prefill": the logits behind one prompt of `context` tokens, from nothing, in steps as large as the system
    takes. "decode": one step of `batch` sequences that hold `context` tokens each and get one more.
    """

    kind: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens that one run computes."""
        return self.context if self.kind == "prefill" else self.batch

    @property
    def name(self) -> str:
        """For people."""
        if self.kind == "prefill":
            return f"prefill {self.context}"
        return f"decode batch {self.batch}, context {self.context}"


class System(Protocol):
    """What is timed. `load`: seconds from opening the model until a first token is there. `processes`: those whose
    `memory` is told, for people.
    """

    name: str
    load: float

    @property
    def processes(self) -> str:
        """See above."""

    def run(self, work: Work, steps: int) -> float:
        """Seconds of one prefill, or of one of `steps` decode steps in a row."""

    def memory(self) -> Memory:
        """Of those processes, pages of files included."""


@dataclass(frozen=True)
class Timing:
    """One system at one work: `seconds` of each repeat, in order."""

    system: str
    work: Work
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> tuple[float, float, float]:
        """Tokens a second: median, least and most."""
        tokens = self.work.tokens
        return tokens / self.median, tokens / max(self.seconds), tokens / min(self.seconds)


def works(
    batches: Iterable[int], contexts: Iterable[int], prefills: Iterable[int], max_num_seqs: int, longest: int
) -> list[Work]:
    """What a plan of `max_num_seqs` sequences of up to `longest` tokens is timed at: prompts, batches of short
    sequences, and single sequences of growing length. What lies beyond the plan is lowered to the most that it takes.
    """
    short = min(SHORT_CONTEXT, longest)
    chosen = [Work("prefill", 1, min(n, longest)) for n in prefills]
    chosen += [Work("decode", min(n, max_num_seqs), short) for n in batches]
    chosen += [Work("decode", 1, min(n, longest)) for n in contexts]
    return list(dict.fromkeys(chosen))


def measure(
    systems: Sequence[System], chosen: Sequence[Work], repeats: int, steps: int, between: Callable[[], None]
) -> list[Timing]:
    """Times every system at every work, `repeats` times over, in turn: a noisy moment meets all of them. `between` is
    called once a round. A first round is not counted: it fills caches and contexts.
    """
    seconds: dict[tuple[str, Work], list[float]] = {(s.name, work): [] for work in chosen for s in systems}
    for number in range(repeats + 1):
        between()
        for work in chosen:
            for system in systems:
                taken = system.run(work, steps if number else 1)
                if number:
                    seconds[system.name, work].append(taken)
    return [Timing(name, work, tuple(taken)) for (name, work), taken in seconds.items()]
