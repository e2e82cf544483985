"""A plan in service: core process, front end and text, started and ended together. HTTP server and Engine stand on it.

Comes in: an open `Plan`, `CoreOptions`. Goes out: `Service`. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Sequence as Seq
from typing import Self

import msgspec

from llmc.artifacts.errors import EnvironmentFault, LlmcError, PlanError, UsageError
from llmc.artifacts.plan import Plan
from llmc.runtime.core_process import CoreProcess
from llmc.runtime.front import PROGRESS_DEADLINE, FrontEnd, Observer
from llmc.runtime.machine import STOPPED_SECONDS, ending, is_stopped
from llmc.runtime.messages import Abort, FromCore, Ready, Shutdown, Submit
from llmc.runtime.model_text import ModelText
from llmc.runtime.options import CoreOptions

#: Sections that only the core and its ranks read.
_OF_THE_CORE = ("weights/", "code/", "graph/")
_WATCH_SECONDS = 0.5
#: A core that has loaded speaks at least once a second. So long it may say nothing, in seconds.
_SILENT_SECONDS = 8.0
#: Beyond its own step timeout, so long may the core make no step with requests in flight, in seconds.
_STUCK_SECONDS = 10.0
_ERROR_OF_EXIT: dict[int, type[LlmcError]] = {2: UsageError, 3: PlanError}


class Service:
    """`front` submits requests, `text` makes them. A service that has failed stays failed."""

    text: ModelText

    def __init__(self, plan: Plan, options: CoreOptions, observer: Observer | None, progress_deadline: float) -> None:
        self.plan = plan
        self.process: CoreProcess | None = None
        self.priorities = tuple(options.priority_weights)  # the classes that a request may name
        self._queue = options.max_num_queued_reqs
        self.front = FrontEnd(self._send, observer, progress_deadline)
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        plan: Plan,
        options: CoreOptions,
        *,
        observer: Observer | None = None,
        command: Seq[str] | None = None,
        progress_deadline: float = PROGRESS_DEADLINE,
    ) -> Self:
        """Starts the core and reads the tokenizer meanwhile; `wait_ready` tells when requests may come.

        What is read here of a plan that nobody has verified (`options.verify`) is verified here, the rest by the core.
        """
        options.check(plan.manifest.profile)
        if options.verify:
            plan.require_unaltered(but=_OF_THE_CORE)
        options = msgspec.structs.replace(options, digest=plan.digest)
        service = cls(plan, options, observer, progress_deadline)
        service.process = CoreProcess(plan.path, options, command)
        try:
            service.text = ModelText(plan)
            _trim()
            await service.process.connect(service._receive, service._on_gone)
            service._watcher = asyncio.create_task(service._watch(options.step_timeout + _STUCK_SECONDS))
            service._watcher.add_done_callback(service._on_watched)
        except BaseException:
            await service.close()
            raise
        return service

    async def wait_ready(self) -> None:
        """Returns once the core generates; raises LlmcError, of the kind that its exit code stands for, if it fails."""
        await self.front.started.wait()
        if self.front.failure is not None:
            assert self.process is not None
            await self.process.wait_exit(1.0)
            kind = _ERROR_OF_EXIT.get(self.process.exit_code or 0, EnvironmentFault)
            await self.close()
            raise kind(self.front.failure)

    @property
    def most_sequences(self) -> int | None:
        """How many sequences a ready core holds at once, at work and waiting; None for no bound."""
        core = self.front.core
        return None if core is None or self._queue is None else core.max_num_seqs + self._queue

    async def close(self) -> None:
        """Ends the core; requests in flight end with an error."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.front.abort_all("the engine is shutting down")
        if self.process is not None:
            await self.process.stop()
        self.front.fail("the engine was shut down")

    async def _watch(self, patience: float) -> None:
        """Kills a core that is stopped, silent, or makes no step for `patience` seconds: its socket would stay open.

        It counts its own turns, not time: time also passes while this very process is stopped.
        """
        assert self.process is not None
        front = self.front
        stopped = silent = stuck = 0
        messages, progress = front.messages, front.progress
        while front.failure is None:
            await asyncio.sleep(_WATCH_SECONDS)
            stopped = stopped + 1 if is_stopped(self.process.process.pid) else 0
            silent = silent + 1 if front.core is not None and front.messages == messages else 0
            stuck = stuck + 1 if front.in_flight and front.progress == progress else 0
            messages, progress = front.messages, front.progress
            if stopped * _WATCH_SECONDS >= STOPPED_SECONDS:
                self._give_up("is stopped (SIGSTOP or a debugger)")
            elif silent * _WATCH_SECONDS >= _SILENT_SECONDS:
                self._give_up(f"has given no sign of life for {_SILENT_SECONDS:g} s")
            elif stuck * _WATCH_SECONDS >= patience:
                self._give_up(f"has made no step for {patience:g} s")

    def _on_watched(self, watcher: asyncio.Task[None]) -> None:
        # Without a watchdog a client could wait for ever. A process without memory loses it first.
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._give_up(f"cannot be watched any more: {error!r}")

    def _give_up(self, how: str) -> None:
        assert self.process is not None
        self.front.fail(f"the engine core {how}")
        self.process.process.kill()

    def _send(self, message: Submit | Abort | Shutdown) -> None:
        assert self.process is not None
        self.process.send(message)

    def _receive(self, message: FromCore) -> None:
        if isinstance(message, Ready):
            self.text.narrow(message)
        self.front.receive(message)

    def _on_gone(self) -> None:
        assert self.process is not None
        code = self.process.exit_code
        how = "closed its connection" if code is None else ending(code)
        self.front.fail(f"the engine core {how}")


def _trim() -> None:
    """Gives back what parsing the tokenizer took: its allocator would keep it, a third of the process's memory."""
    with contextlib.suppress(AttributeError):  # glibc has it, other C libraries do not need it
        ctypes.CDLL(None).malloc_trim(0)
