"""Waiting for other processes on a machine that is busy, or stands still for a while; and having one stand still."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_TICK = 0.02


class _Ticker(threading.Thread):
    """Sleeps again and again; by as much as it wakes too late this machine, or this process, stood still."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="ticker")
        self._late, self._due = 0.0, time.monotonic() + _TICK
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(_TICK)
            late = max(time.monotonic() - self._due, 0.0)
            self._late, self._due = self._late + late, time.monotonic() + _TICK

    def late(self) -> float:
        """Seconds so far, with those of a sleep that should be over."""
        return self._late + max(time.monotonic() - self._due, 0.0)


_ticker: _Ticker | None = None


def _late() -> float:
    global _ticker
    if _ticker is None or not _ticker.is_alive():  # a forked process has no thread of its parent's
        _ticker = _Ticker()
    return _ticker.late()


def _stalled() -> float:
    """Seconds for which some process of this machine had to wait for a processor; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split()[4].partition("=")[2]) / 1e6
    except OSError:
        return 0.0


class Stopwatch:
    """Time as far as it is the server's own: not that for which the machine stood still; and where processors are taken
    by others, up to four times as long.
    """

    def __init__(self) -> None:
        self._began, self._stalled, self._late = time.monotonic(), _stalled(), _late()

    def seconds(self) -> float:
        taken = time.monotonic() - self._began
        return taken - max(0.75 * min(_stalled() - self._stalled, taken), min(_late() - self._late, taken))

    def wait(self, done: Callable[[], object], seconds: float) -> bool:
        """Waits until `done`, or until the watch shows so many seconds; says whether it came to be."""
        while not done():
            if self.seconds() > seconds:
                return bool(done())  # it may have come true while this very process stood still
            time.sleep(_TICK)
        return True


@contextlib.contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process is stopped meanwhile: what it is sent within it finds all at once, however slow its senders are."""
    os.kill(pid, signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{pid}/stat")
        assert Stopwatch().wait(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 30)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
