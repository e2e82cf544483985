"""How many tokens a step may take so that it ends within a time budget, learnt from the steps so far.

Comes in: tokens and seconds of each step. Goes out: a number of tokens. Must not know: sequences, clocks.
Standard library only.

After each step the limit moves towards what would have filled the budget if time were proportional to tokens. A step
also has a fixed part (weights are read once), so this stays on the safe side on the way up, and comes to rest exactly
where a full step takes what is aimed at. No model of the machine is fitted: contexts grow, neighbours come and go, and
a line through noisy steps of one size is worth nothing.
"""

from __future__ import annotations

#: Share of the budget that is aimed at: steps of equal tokens differ.
_AIM = 0.9
#: The most by which one step changes the limit, up or down: it may have been an exception.
_CHANGE = 2.0


class Pace:
    """Aims at steps of at most `seconds`; answers lie between `least` and `most` tokens, at first `least`."""

    def __init__(self, seconds: float, least: int, most: int) -> None:
        if seconds <= 0 or not 1 <= least <= most:
            raise ValueError(f"a pace of {seconds} s and {least} to {most} tokens")
        self.seconds = seconds
        self._least, self._most = least, most
        self._limit = float(least)

    def observe(self, tokens: int, seconds: float) -> None:
        """Takes in a step. `tokens` is at least 1. One well below the limit says little unless it was too slow."""
        aim = self.seconds * _AIM
        fits = tokens * min(aim / max(seconds, 1e-9), _CHANGE)
        if seconds > aim:
            self._limit = max(min(self._limit, fits), self._limit / _CHANGE)
        else:
            self._limit = max(self._limit, fits)
        self._limit = min(max(self._limit, self._least), self._most)

    def tokens(self) -> int:
        """The most tokens that the next step should take."""
        return int(self._limit)
