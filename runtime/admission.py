"""Whether one more sequence fits beside those at work, and how many may wait for that, and how long.

Comes in: sizes of sequences, times at which some ended. Goes out: blocks that will be needed, seconds to wait.
Must not know: which blocks, whose request. Standard library and errors only; time is an argument.

What runs grows, so a sequence that fits now may not fit soon, and whoever is set back then has cost its work. So the
peak of what is held is worked out ahead, as if each sequence went on to the length of the average answer so far: until
answers have been seen, and for answers longer than the average, that is no growth at all, and requests without
`max_tokens` are not held to what they could need at worst. Where the estimate is too low, preemption sets it right.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sized
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from llmc.artifacts.errors import UsageError

#: Share of the pool that admission leaves free: what the estimate has missed comes out of it.
_WATERMARK = 0.01
#: Weight of the latest answer in the average length.
_NEWEST = 0.05
#: Ends that the rate of ends is taken over, and the bounds of what a client is told to wait, in seconds.
_ENDS, _SOONEST, _LATEST = 64, 1, 60


def most_tokens(prompt: int, wanted: int | None, max_seq_len: int, num_blocks: int, block_size: int) -> int:
    """How many tokens a sequence of a `prompt` may have in the end, with `wanted` generated ones (None: no bound of its
    own). Raises UsageError, with the numbers, for one that could never end within the engine's and the pool's limits.
    """
    if prompt == 0:
        raise UsageError("the prompt has no tokens; at least one is needed")
    if wanted is not None and wanted < 1:
        raise UsageError(f"max_tokens is {wanted}; it must be at least 1")
    least, held = prompt + (wanted or 1), num_blocks * block_size
    what = f"{prompt} tokens of prompt and {wanted or 1} to be generated are {least}"
    if least > max_seq_len:
        raise UsageError(f"{what}, more than this engine's max_seq_len of {max_seq_len}")
    if least > held:
        raise UsageError(
            f"{what}, more than the {held} that the KV pool holds ({num_blocks} blocks of {block_size}); a larger "
            f"--kv-bytes would help"
        )
    return min(max_seq_len, held, max_seq_len if wanted is None else least)


class Growth(NamedTuple):
    """A sequence in the making: `tokens` that lie in blocks of its own, and how many it is expected to gain."""

    tokens: int
    remaining: int


def peak_blocks(work: Iterable[Growth], block_size: int) -> int:
    """The most blocks that sequences hold of their own while each gains a token a step until its `remaining` are there.

    An upper bound, at most one block a sequence too high: a sum of tokens is rounded up, not each of its terms.
    """
    ending = sorted(work, key=lambda growth: growth.remaining)
    held, peak = sum(growth.tokens for growth in ending), 0
    for index, growth in enumerate(ending):
        going = len(ending) - index
        peak = max(peak, (held + going * growth.remaining) // block_size + going)
        held -= growth.tokens
    return peak


class AnswerLength:
    """The average length of answers, recent ones counting most."""

    def __init__(self) -> None:
        self._mean = 0.0

    def ended(self, generated: int) -> None:
        """An answer came to its end after so many tokens."""
        self._mean += (generated - self._mean) * _NEWEST

    def remaining(self, generated: int, most: int) -> int:
        """How many more a sequence is expected to generate; `most` is what its limit leaves."""
        return min(max(int(self._mean) - generated, 0), most)


class Holder(Protocol):
    """What admission sees of a sequence."""

    @property
    def tokens(self) -> Sized:
        """Of its prompt and its answer so far."""

    @property
    def blocks(self) -> Sized:
        """All that it holds."""

    @property
    def borrowed(self) -> int:
        """How many of them are others', too."""

    @property
    def generated(self) -> int:
        """Tokens of its answer so far."""

    @property
    def limit(self) -> int:
        """Tokens that it may have in the end."""


class Forecast:
    """Whether a pool's blocks will do, as far as answers so far tell."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.answers = AnswerLength()
        self._block_size = block_size
        self._watermark = max(1, int(num_blocks * _WATERMARK))

    def fits(self, work: Seq[Holder], sequence: Holder, prefix: int, available: int) -> bool:
        """Whether `available` blocks will do until the first of those at `work` end, with the sequence among them, of
        whose blocks `prefix` are there.
        """
        own = sum(len(holder.blocks) - holder.borrowed for holder in work)
        growths = [self._growth(holder, holder.borrowed) for holder in work]
        peak = peak_blocks([*growths, self._growth(sequence, prefix)], self._block_size)
        fresh = -(-len(sequence.tokens) // self._block_size) - prefix
        return max(peak - own, fresh) + self._watermark <= available

    def _growth(self, holder: Holder, borrowed: int) -> Growth:
        tokens = len(holder.tokens)
        gain = self.answers.remaining(holder.generated, holder.limit - tokens)
        return Growth(tokens - borrowed * self._block_size, gain)


class Patience:
    """The bounds of the queue: `most` sequences, `timeout` seconds; None for no bound."""

    def __init__(self, most: int | None, timeout: float | None) -> None:
        self.most = most
        self.timeout = timeout
        self._ends: deque[float] = deque(maxlen=_ENDS)

    def ended(self, now: float) -> None:
        """A sequence has ended, so another one got its place."""
        self._ends.append(now)

    def retry_after(self, waiting: int, now: float) -> int:
        """Whole seconds after which as many have probably ended as wait now."""
        if len(self._ends) < 2:
            return _SOONEST
        each = (now - self._ends[0]) / (len(self._ends) - 1)
        return min(max(math.ceil(waiting * each), _SOONEST), _LATEST)

    def is_tried(self, waiting: int, arrivals: Iterable[float], now: float) -> bool:
        """Whether too many wait, or one of those that came at `arrivals` has waited too long."""
        return self._excess(waiting) > 0 or any(self._is_over(arrived, now) for arrived in arrivals)

    def split(self, arrivals: Seq[float], now: float) -> tuple[int, int]:
        """Of those that wait, the earliest first: how many of the first have waited too long, and how many of the last
        are too many for the rest of the queue.
        """
        late = sum(self._is_over(arrived, now) for arrived in arrivals)
        return late, self._excess(len(arrivals) - late)

    def _excess(self, waiting: int) -> int:
        return 0 if self.most is None else max(waiting - self.most, 0)

    def _is_over(self, arrived: float, now: float) -> bool:
        return self.timeout is not None and now - arrived > self.timeout
