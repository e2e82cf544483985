"""The front end: groups of sequences, what it tells the core, and whether it calls itself ready."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.runtime.front import FrontEnd, Group, Observer, Times
from llmc.runtime.messages import Abort, Fatal, Output, Ready, SamplingParams, Stats, Submit
from llmc.runtime.sequence import Sequence
from llmc.runtime.text import Tokenizer
from tests.unit.runtime.fake_plan import byte_level

TOKENIZER = Tokenizer(byte_level().to_str().encode())
ONE = TOKENIZER.encode("one")


class Counting(Observer):
    def __init__(self) -> None:
        self.first = self.later = 0
        self.finished: list[str | None] = []

    def on_tokens(self, seconds: float, count: int, first: bool) -> None:
        self.first += first
        self.later += 0 if first else count

    def on_finish(self, sequence: Sequence, times: Times) -> None:
        self.finished.append(sequence.finish_reason)


class Bench:
    """A front end whose core is the test."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.observer = Counting()
        self.front = FrontEnd(self.sent.append, self.observer, 10.0)
        self.front.receive(Ready(8, 4, 64, 0.1))

    def submit(self, n: int = 1, **params: Any) -> Group:
        p = SamplingParams(**params)
        return self.front.submit([(ONE, p, TOKENIZER.detokenizer()) for _ in range(n)])

    def answer(self, group: Group, index: int, text: str, finish: str | None = None) -> None:
        self.front.receive(Output(f"{group.id}-{index}", TOKENIZER.encode(text), None, finish))  # type: ignore[arg-type]


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Bench()), 120)

    asyncio.run(main())


def stats(steps: int) -> Stats:
    return Stats(1, 0, 1, 8, steps, 0, 0, 0, 0, 0, 0.0)


def test_answers_of_a_group_are_told_apart() -> None:
    async def test(bench: Bench) -> None:
        group = bench.submit(2)
        assert [type(m) for m in bench.sent] == [Submit, Submit]
        bench.answer(group, 1, "two", "stop")
        bench.answer(group, 0, "one", "length")
        found = {i: (d.text, d.finish_reason) async for i, d in group}
        assert found == {0: ("one", "length"), 1: ("two", "stop")}
        assert bench.front.in_flight == 0

    run(test)


def test_a_slow_reader_gets_merged_deltas() -> None:
    async def test(bench: Bench) -> None:
        group = bench.submit()
        for text in ("one ", "two ", "three"):
            bench.answer(group, 0, text)
        bench.answer(group, 0, "", "stop")
        assert [d.text async for _, d in group] == ["one two three"]

    run(test)


def test_a_stop_string_ends_the_answer_and_tells_the_core() -> None:
    async def test(bench: Bench) -> None:
        group = bench.submit(stop=("STOP",))
        bench.answer(group, 0, "one STOP more")
        bench.answer(group, 0, "what the core made meanwhile")
        bench.answer(group, 0, "", "stop")
        assert [(d.text, d.finish_reason) async for _, d in group] == [("one ", "stop")]
        assert bench.sent[1:] == [Abort(f"{group.id}-0", "stop")]
        assert bench.observer.finished == ["stop"]

    run(test)


def test_leaving_a_group_aborts_what_still_runs() -> None:
    async def test(bench: Bench) -> None:
        with bench.submit(2) as group:
            bench.answer(group, 0, "one", "stop")
            await anext(group)
        assert bench.sent[2:] == [Abort(f"{group.id}-1")]
        assert bench.front.in_flight == 0
        bench.answer(group, 1, "late", "abort")  # the core's last word on it
        assert [d async for _, d in group] == []
        assert sorted(bench.observer.finished, key=str) == ["abort", "stop"]

    run(test)


def test_cancelling_wakes_the_reader() -> None:
    async def test(bench: Bench) -> None:
        group = bench.submit()
        asyncio.get_running_loop().call_later(0.01, group.cancel)
        assert [d async for _, d in group] == []

    run(test)


def test_the_cores_death_ends_every_request_with_an_error() -> None:
    async def test(bench: Bench) -> None:
        group = bench.submit(2)
        bench.front.receive(Fatal("rank 1 died"))
        bench.front.fail("its socket closed")  # comes after every Fatal
        deltas = [d async for _, d in group]
        assert [(d.finish_reason, d.error) for d in deltas] == [("error", "rank 1 died")] * 2
        assert bench.front.not_ready() == "the engine has stopped: rank 1 died"
        late = [d async for _, d in bench.submit()]
        assert [(d.finish_reason, d.error) for d in late] == [("error", "rank 1 died")]

    run(test)


def test_readiness() -> None:
    async def test(bench: Bench) -> None:
        now = [0.0]
        bench.front._loop = SimpleNamespace(time=lambda: now[0])  # type: ignore[assignment]
        assert FrontEnd(bench.sent.append).not_ready() == "the engine is loading"
        assert bench.front.not_ready() is None
        now[0] += 11
        assert bench.front.not_ready() is None  # idle: no step is due
        group = bench.submit()
        assert bench.front.not_ready() is None
        now[0] += 11
        assert "no step" in (bench.front.not_ready() or "")
        bench.front.receive(stats(1))
        assert bench.front.not_ready() is None
        now[0] += 11
        bench.front.receive(stats(1))  # says nothing new
        assert "no step" in (bench.front.not_ready() or "")
        bench.answer(group, 0, "one")
        assert bench.front.not_ready() is None
        bench.front.draining = True
        assert bench.front.not_ready() == "the server is shutting down"

    run(test)


def test_times_are_observed() -> None:
    async def test(bench: Bench) -> None:
        group = bench.submit()
        bench.answer(group, 0, "o")
        bench.answer(group, 0, "abc", "length")
        assert (bench.observer.first, bench.observer.later) == (1, len(TOKENIZER.encode("abc")))
        assert bench.observer.finished == ["length"]

    run(test)


@pytest.mark.parametrize("finish", [True, False])
def test_waiting_for_the_last_answer(finish: bool) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.front.wait_idle(0.01)
        group = bench.submit()
        if finish:
            asyncio.get_running_loop().call_later(0.01, bench.answer, group, 0, "one", "stop")
        assert await bench.front.wait_idle(60 if finish else 0.05) is finish

    run(test)
