"""What a build tells of its stages while it runs, and how long each took. The default says nothing and keeps the times.

Comes in: stage names. Goes out: seconds per stage. Must not know: terminals; the command line overrides the hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """`seconds` maps a stage's name to the wall-clock seconds it took; `reused` are the stages whose result an earlier
    build had made. Stages follow one another, never nested.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reused: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Times what runs inside. The yielded function is told how many of `total` units are done."""
        began = time.perf_counter()
        self.started(name, total)
        try:
            yield lambda done: self.advanced(name, done, total)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.finished(name, self.seconds[name])

    def started(self, name: str, total: int | None) -> None:
        """Called when a stage begins."""

    def advanced(self, name: str, done: int, total: int | None) -> None:
        """Called when `done` of `total` units are complete."""

    def finished(self, name: str, seconds: float) -> None:
        """Called when a stage is complete; not when it failed."""
