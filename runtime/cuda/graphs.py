"""Graphs of decode steps: captured once, replayed, and given up where memory is short.

Comes in: a stream, what it is to do. Goes out: replays. Must not know: programs, steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmc.runtime.cuda.buckets import MOST_GRAPHS
from llmc.runtime.cuda.driver import OutOfMemory, ReadyGraph, Stream, destroy_graph

#: Sequences and context.
Key = tuple[int, int]


class Graphs:
    """Those of the last `most` keys. Where the GPU's memory does not hold another one, the least recently used go; a
    key whose graph does not fit even alone has none from then on. With `together` ranks sum within a graph: NCCL wants
    all of them to capture and replay alike, so memory that is short on one of them is its end.
    """

    def __init__(self, stream: Stream, *, together: bool, most: int = MOST_GRAPHS) -> None:
        self._stream, self._together, self._most = stream, together, most
        self._ready: dict[Key, ReadyGraph] = {}  # the least recently used first
        self._without: set[Key] = set()

    def replay(self, key: Key) -> bool:
        """Has the stream do what was recorded; False where nothing is."""
        graph = self._ready.pop(key, None)
        if graph is None:
            return False
        self._ready[key] = graph
        while True:
            try:
                self._stream.replay(graph)  # the first replay takes memory, too
                return True
            except OutOfMemory:
                if self._together:
                    raise
                self._drop()
                if key not in self._ready:
                    self._without.add(key)
                    return False

    def wants(self, key: Key) -> bool:
        """Whether it is to be recorded."""
        return key not in self._ready and key not in self._without

    def record(self, key: Key, work: Callable[[], None]) -> None:
        """Records what `work` asks of the stream, which is not done now. Nothing may be under way."""
        self._stream.begin_capture()
        work()
        captured = self._stream.end_capture()
        while len(self._ready) >= self._most:
            self._drop()
        try:
            graph = self._instantiate(captured)
        finally:
            destroy_graph(captured)
        if graph is None:
            self._without.add(key)
        else:
            self._ready[key] = graph

    def _instantiate(self, captured: Any) -> ReadyGraph | None:
        """Ready to be replayed; None where memory is short whatever goes."""
        while True:
            try:
                return ReadyGraph(captured)
            except OutOfMemory:
                if self._together:
                    raise
                if not self._ready:
                    return None
                self._drop()

    def _drop(self) -> None:
        """The least recently used one; one that still runs ends first."""
        self._ready.pop(next(iter(self._ready))).destroy()
