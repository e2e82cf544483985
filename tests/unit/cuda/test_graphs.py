"""Which graphs are held, and what happens where memory is short: with graphs that are names."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime.cuda import graphs
from llmc.runtime.cuda.buckets import bucket, context_bucket
from llmc.runtime.cuda.driver import OutOfMemory
from llmc.runtime.cuda.graphs import Graphs


class Stream:
    """Holds `room` ready graphs; of those in `large` no replay fits beside another graph."""

    def __init__(self, room: int) -> None:
        self.room, self.captured, self.large = room, 0, set[int]()
        self.live: list[int] = []
        self.replayed: list[int] = []

    def begin_capture(self) -> None:
        self.captured += 1

    def end_capture(self) -> int:
        return self.captured

    def replay(self, graph: Any) -> None:
        if graph.name in self.large:
            raise OutOfMemory("full")
        self.replayed.append(graph.name)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream(100)

    class Ready:
        def __init__(self, name: int) -> None:
            if len(made.live) >= made.room:
                raise OutOfMemory("full")
            self.name = name
            made.live.append(name)

        def destroy(self) -> None:
            made.live.remove(self.name)

    monkeypatch.setattr(graphs, "ReadyGraph", Ready)
    monkeypatch.setattr(graphs, "destroy_graph", lambda captured: None)
    return made


def graphs_of(stream: Stream, together: bool = False, most: int = 3) -> Graphs:
    return Graphs(stream, together=together, most=most)  # type: ignore[arg-type]


def step(held: Graphs, size: int) -> None:
    """As an engine does."""
    if not held.replay((size, 256)) and held.wants((size, 256)):
        held.record((size, 256), lambda: None)


def test_the_least_recently_used_goes_where_there_are_too_many(stream: Stream) -> None:
    held = graphs_of(stream)
    for size in (1, 2, 4, 1, 8):
        step(held, size)
    assert stream.live == [1, 3, 4]
    assert stream.replayed == [1]
    assert held.wants((2, 256))


def test_others_go_until_one_fits(stream: Stream) -> None:
    held = graphs_of(stream, most=10)
    for size in (1, 2, 4):
        step(held, size)
    stream.room = 1
    step(held, 8)
    assert stream.live == [4]


def test_what_never_fits_is_not_tried_again(stream: Stream) -> None:
    stream.room = 0
    held = graphs_of(stream)
    for _ in range(3):
        step(held, 1)
    assert stream.captured == 1


def test_a_replay_that_does_not_fit_ends_its_graph_after_all_others(stream: Stream) -> None:
    held = graphs_of(stream)
    for size in (1, 2, 4):
        step(held, size)
    stream.large = {2}
    assert not held.replay((2, 256))
    assert stream.live == []
    assert not held.wants((2, 256))
    assert held.wants((1, 256))


def test_ranks_that_sum_together_do_not_part(stream: Stream) -> None:
    stream.room = 1
    held = graphs_of(stream, together=True)
    step(held, 1)
    with pytest.raises(EnvironmentFault):
        step(held, 2)
    assert stream.live == [1]


def test_sizes_and_contexts_of_graphs() -> None:
    assert [bucket(n, 60) for n in (1, 2, 3, 5, 8, 9, 17, 57, 60)] == [1, 2, 4, 8, 8, 16, 24, 60, 60]
    assert [context_bucket(n, 5000) for n in (1, 256, 257, 4096, 4097)] == [256, 256, 512, 4096, 5000]
