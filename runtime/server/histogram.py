"""Histograms as lists of counts: recording a value costs a bisection, because it happens for every token.

Comes in: numbers. Goes out: cumulative counts, as Prometheus wants them. Must not know: what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Records a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Seq[float], counts: Seq[int]) -> list[tuple[str, float]]:
    """Counts up to each bound, and of all, from those between the bounds."""
    total = 0
    found = []
    for bound, count in zip((*map(float, bounds), "+Inf"), counts, strict=True):
        total += count
        found.append((str(bound), float(total)))
    return found
