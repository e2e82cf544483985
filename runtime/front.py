"""The front end: submits sequences to the core, turns what it sends into deltas, and knows whether generation works.

Comes in: token ids and parameters; the core's messages. Goes out: `Group`s, to be iterated for deltas; readiness.
Must not know: HTTP, how the core schedules.

All of it runs in one event loop. A group's deltas merge until they are taken, so that a slow reader costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from llmc.runtime.messages import (
    Abort,
    Fatal,
    FromCore,
    Handling,
    Output,
    Ready,
    SamplingParams,
    Shutdown,
    Stats,
    Submit,
)
from llmc.runtime.sequence import Delta, Sequence
from llmc.runtime.text import Detokenizer

#: With requests in flight, generation counts as working while the core shows progress at least this often, in seconds.
PROGRESS_DEADLINE = 9.0


@dataclass(slots=True)
class Times:
    """When things happened to a sequence, in seconds after its submission. `first` and `last`: its tokens, if any."""

    queued: float = 0.0
    first: float | None = None
    last: float = 0.0
    end: float = 0.0


class Observer:
    """What a front end tells whoever counts: times in seconds. The base counts nothing."""

    def on_tokens(self, seconds: float, count: int, first: bool) -> None:
        """Tokens came, `seconds` after the sequence's previous ones (`first`: after its submission)."""

    def on_finish(self, sequence: Sequence, times: Times) -> None:
        """A sequence ended; its finish_reason is set."""


class _Live:
    """A sequence that the core works on, and where its deltas go."""

    __slots__ = ("group", "index", "pending", "request_id", "sequence", "started", "times")

    def __init__(self, request_id: str, sequence: Sequence, group: Group, index: int, now: float) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.group = group
        self.index = index
        self.pending: Delta | None = None
        self.started = now
        self.times = Times()


class Group:
    """The sequences of one request. `async for index, delta in group` ends when all have ended.

    Leaving `with group` aborts what still runs. `id` is a fresh random name; `sequences[i]` counts the i-th answer.
    """

    def __init__(self, front: FrontEnd, identity: str) -> None:
        self.id = identity
        self.sequences: list[Sequence] = []
        self.cancelled = False
        self._front = front
        self._lives: list[_Live] = []
        self._ready: deque[_Live] = deque()
        self._unfinished = 0
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while not self._ready:
            if self.cancelled or not self._unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        live = self._ready.popleft()
        delta, live.pending = live.pending, None
        assert delta is not None
        if delta.finish_reason is not None:
            self._unfinished -= 1
        return live.index, delta

    def cancel(self) -> None:
        """Stops whatever still runs; the iteration ends. Does nothing to a group that has ended."""
        if self._unfinished and not self.cancelled:
            self.cancelled = True
            self._ready.clear()
            for live in self._lives:
                self._front.abort(live.request_id)
            self._wake()

    def add(self, live: _Live) -> None:
        """Joins a sequence to the group."""
        self._lives.append(live)
        self.sequences.append(live.sequence)
        self._unfinished += 1

    def deliver(self, live: _Live, delta: Delta) -> None:
        """Leaves a delta for the reader."""
        if self.cancelled:
            return
        if live.pending is not None:
            live.pending.merge(delta)
            return
        live.pending = delta
        self._ready.append(live)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class FrontEnd:
    """Speaks with one core through `send`; whoever reads the channel calls `receive` and, at its end, `fail`."""

    def __init__(
        self,
        send: Callable[[Submit | Abort | Shutdown], None],
        observer: Observer | None = None,
        progress_deadline: float = PROGRESS_DEADLINE,
    ) -> None:
        self._send = send
        self._observer = observer or Observer()
        self._deadline = progress_deadline
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, _Live] = {}
        self._progress = self._loop.time()
        self._messages = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.started = asyncio.Event()  # set by Ready, and by a failure before it
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.draining = False
        self.core: Ready | None = None
        self.stats: Stats | None = None

    # Requests

    def submit(
        self,
        requests: Iterable[tuple[list[int], SamplingParams, Detokenizer]],
        handling: Handling = Handling(),  # noqa: B008 - frozen
    ) -> Group:
        """Starts one sequence per (prompt, checked parameters, fresh detokenizer), all handled alike."""
        group = Group(self, secrets.token_hex(12))
        if not self._live:
            self._progress = self._loop.time()
        for index, (prompt, params, detokenizer) in enumerate(requests):
            live = _Live(
                f"{group.id}-{index}", Sequence(params, len(prompt), detokenizer), group, index, self._loop.time()
            )
            group.add(live)
            if self.failure is not None:
                live.sequence.finish_reason = "error"
                group.deliver(live, Delta(finish_reason="error", error=self.failure))
                continue
            self._send(Submit(live.request_id, prompt, params, handling))
            self._live[live.request_id] = live
            self._idle.clear()
        return group

    def abort(self, request_id: str) -> None:
        """Tells the core to stop a request whose reader has gone; nothing more is delivered."""
        if (live := self._forget(request_id)) is not None:
            self._send(Abort(request_id))
            live.sequence.finish_reason = "abort"
            self._finish(live)

    def abort_all(self, error: str) -> None:
        """Ends every request with an error, and tells the core."""
        for live in list(self._live.values()):
            self._send(Abort(live.request_id))
            self._end_with_error(live, error)

    @property
    def progress(self) -> float:
        """When the core last did something for a request, by the event loop's clock."""
        return self._progress

    @property
    def messages(self) -> int:
        """How many messages have come: one that stands still is a core that does."""
        return self._messages

    @property
    def in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    async def wait_idle(self, seconds: float) -> bool:
        """Waits until nothing is in flight; False if that takes longer than `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    # The core's messages

    def receive(self, message: FromCore) -> None:
        """Takes one message of the core."""
        self._messages += 1
        if type(message) is Output:
            self._on_output(message)
        elif type(message) is Stats:
            self._on_stats(message)
        elif type(message) is Ready:
            self.core = message
            self._progress = self._loop.time()
            self.started.set()
        elif type(message) is Fatal:
            self.fail(message.error)

    def _on_output(self, output: Output) -> None:
        now = self._progress = self._loop.time()
        live = self._live.get(output.request_id)
        if live is None:
            return  # aborted, or ended by a stop string: the core had not heard of it yet
        sequence = live.sequence
        first = sequence.completion_tokens == 0
        delta = sequence.accept(output)
        if delta.tokens:
            at = now - live.started
            self._observer.on_tokens(at - live.times.last, len(delta.tokens), first)
            live.times.last = at
            if first:
                live.times.first, live.times.queued = at, output.queue_seconds
        if sequence.finish_reason is not None:
            if isinstance(delta.stop_reason, str) and output.finish_reason is None:
                self._send(Abort(output.request_id, "stop"))
            self._forget(output.request_id)
            self._finish(live)
        live.group.deliver(live, delta)

    def _on_stats(self, stats: Stats) -> None:
        if self.stats is None or stats.steps != self.stats.steps:
            self._progress = self._loop.time()
        self.stats = stats

    def fail(self, error: str) -> None:
        """The core has gone: every request ends with an error, every later one too. Only the first call counts."""
        if self.failure is not None:
            return
        self.failure = error
        for live in list(self._live.values()):
            self._end_with_error(live, error)
        self.failed.set()
        self.started.set()

    def _end_with_error(self, live: _Live, error: str) -> None:
        self._forget(live.request_id)
        live.sequence.finish_reason = "error"
        self._finish(live)
        live.group.deliver(live, Delta(finish_reason="error", error=error))

    def _finish(self, live: _Live) -> None:
        live.times.end = self._loop.time() - live.started
        self._observer.on_finish(live.sequence, live.times)

    def _forget(self, request_id: str) -> _Live | None:
        live = self._live.pop(request_id, None)
        if not self._live:
            self._idle.set()
        return live

    # Readiness

    def not_ready(self) -> str | None:
        """Why generation does not work now; None when it does."""
        if self.failure is not None:
            return f"the engine has stopped: {self.failure}"
        if self.core is None:
            return "the engine is loading"
        if self.draining:
            return "the server is shutting down"
        stalled = self._loop.time() - self._progress
        if self._live and stalled > self._deadline:
            return f"{len(self._live)} requests are in flight and the engine has made no step for {stalled:.1f} s"
        return None
