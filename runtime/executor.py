"""The ranks of a plan as processes, and a step as one call.

Comes in: an open `Plan`, `StepBatch`es. Goes out: logits, or tokens that a GPU has chosen. Must not know: requests,
scheduling.

Ranks share one anonymous memory file with this process: step arrays, logits and the memory where their compiled code
meets. A step is announced over a socket a rank, and answered there, so that one wait sees an answer, a death and time
running out alike. Nothing has a name in the file system, so nothing can be left behind.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self, TypeVar

import numpy as np

from llmc.artifacts import errors
from llmc.artifacts.errors import EnvironmentFault, LlmcError
from llmc.artifacts.machine import available_memory, usable_cpus
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import HOST_LIBRARY
from llmc.runtime.cuda.gpus import check as check_gpus
from llmc.runtime.cuda.gpus import check_tensorrt, choose_gpu_blocks, survey
from llmc.runtime.host_places import HostPlaces
from llmc.runtime.kv_size import choose_host_places, choose_num_blocks
from llmc.runtime.machine import STOPPED_SECONDS, ending, is_stopped
from llmc.runtime.native import HostLibrary, Library
from llmc.runtime.rank_main import COPY, DONE, FAILED, MAX_DATAGRAM, READY, STEP, RankConfig
from llmc.runtime.step import Chunk, Copies, StepBatch
from llmc.runtime.step_memory import COUNTS, StepLayout, StepMemory

C = TypeVar("C", bound=Chunk)
_COMMAND = (sys.executable, "-P", "-m", "llmc.runtime.rank_main")
#: Seconds that ranks may take to load, beside reading the plan from a disk of at least so many bytes a second.
LOAD_TIMEOUT, SLOWEST_DISK = 300.0, 20e6
_CLOSE_SECONDS = 1.0
#: So long the executor waits at a time before it looks after ranks that have not answered.
_TURN_SECONDS = 0.5


class RankLost(EnvironmentFault):
    """A rank has died, hung, or failed a step; the message says which and how. The executor is closed."""


class ParentGone(Exception):
    """The descriptor that the executor was told to watch has hung up: nobody wants the step any more."""


class _Rank:
    """One process and the socket to it."""

    def __init__(self, number: int, inherit: Iterable[int]) -> None:
        self.number = number
        # Datagrams: an answer is never cut, and the end of the process shows as an empty one.
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno(), *inherit],
            )

    def send(self, data: bytes) -> None:
        """Never waits: a rank is sent one message at a time. A rank that has died shows when it is waited for."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(data)

    def receive(self) -> bytes:
        """The answer that has come; empty when the process has closed its end."""
        with suppress(ConnectionResetError):
            return self.socket.recv(MAX_DATAGRAM)
        return b""

    def is_stopped(self) -> bool:
        """Whether the process is halted."""
        return is_stopped(self.process.pid)

    def ending(self, wait: float) -> str | None:
        """How the process ended, in words; None if it still runs after `wait` seconds."""
        try:
            return ending(self.process.wait(wait))
        except subprocess.TimeoutExpired:
            return None


class Executor:
    """Runs steps of a plan. Close it, or use it in a `with`; ranks also die with the thread that started them.

    `threads` are per rank (default: the usable processors shared out evenly), `kv_bytes` is for all ranks together,
    `num_blocks` says the same in blocks, `host_bytes` is what `copy` may fill. `watch` is a descriptor whose hang-up
    ends a step with ParentGone. With `timed` each launch's time is noted, for `launch_seconds`. `on_wait` is called
    twice a second while it waits. With `verify` the plan's sections are compared with their hashes, while the ranks'
    processes start and before anything of it is loaded. Without `mmap` ranks copy their weights into huge pages. Raises
    LlmcError where the plan cannot be loaded here.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        threads: int | None = None,
        kv_bytes: int | None = None,
        num_blocks: int | None = None,
        max_num_seqs: int | None = None,
        host_bytes: int | None = None,
        step_timeout: float = 60.0,
        watch: int | None = None,
        timed: bool = False,
        on_wait: Callable[[], None] = lambda: None,
        verify: bool = False,
        mmap: bool = True,
    ) -> None:
        plan.check_machine()
        manifest, profile = plan.manifest, plan.manifest.profile
        self.plan, self._mmap = plan, mmap
        self.block_size = profile.block_size
        wish = {"kv_bytes": kv_bytes, "num_blocks": num_blocks, "max_num_seqs": max_num_seqs}
        if manifest.target.on_gpu:
            machine = survey()
            check_gpus(manifest.target, len(manifest.ranks), machine)
            if manifest.target.kind == "tensorrt":
                check_tensorrt(manifest.build.libraries.get("tensorrt"))
            self.num_blocks = choose_gpu_blocks(manifest, machine.gpus, **wish)
        else:
            self.num_blocks = choose_num_blocks(manifest, available_memory() - (host_bytes or 0), **wish)
        #: Places for blocks and recurrent states in host memory, where `copy` puts them.
        self.host_blocks, self.host_states = choose_host_places(manifest, host_bytes, max_num_seqs)
        #: Recurrent states that are held at once: one for each sequence at work.
        self.num_slots = max_num_seqs or profile.max_num_seqs
        tp = len(manifest.ranks)
        self.threads = threads or max(usable_cpus() // tp, 1)
        self.step_timeout = step_timeout
        #: Whether tokens can be chosen where logits are computed: `begin`'s `sampler_params`.
        self.samples = manifest.target.kind == "cuda" and tp == 1
        layout = StepLayout(
            max_tokens=profile.max_num_batched_tokens,
            max_seqs=profile.max_num_seqs,
            table_stride=-(-profile.max_seq_len // profile.block_size),
            vocab=manifest.model.vocab_size,
            comm_bytes=manifest.comm_bytes,
            stamps=max(rank.launches for rank in manifest.ranks) + 1 if timed else 0,
            ranks=tp,
            samples=self.samples,
        )
        self._watch = watch
        self._on_wait = on_wait
        self._num_rows = 0  # of the step that was begun last
        self._stopped_since: float | None = None
        self._poll = select.poll()
        self._ranks: dict[int, _Rank] = {}  # by the descriptor of the socket
        self._loaded = False
        memory_fd, host_fd = os.memfd_create("llmc-step"), os.memfd_create("llmc-host")
        try:
            self._spawn(memory_fd, host_fd)  # what they import takes longer than all that follows
            if verify:
                plan.require_unaltered()
            #: For sampling. Of a cpu plan rank 0's code, loaded here too, which also calls the ranks off.
            self.library = self._load_library()
            os.ftruncate(memory_fd, layout.size)
            self._memory = StepMemory(layout, memory_fd)
            sizes = [program.kv_block_bytes for program in manifest.ranks]
            os.ftruncate(host_fd, HostPlaces.nbytes(sizes, self.host_blocks))
            #: Where `copy` puts blocks of a cpu plan: readable and writable here too, between two copies.
            self.host_places = HostPlaces(sizes, self.host_blocks, host_fd)
            self._start(layout, memory_fd, host_fd)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory_fd)
            os.close(host_fd)

    def _spawn(self, *memory: int) -> None:
        for program in self.plan.manifest.ranks:
            rank = _Rank(program.rank, (*memory, self.plan.descriptor))
            self._ranks[rank.socket.fileno()] = rank
            self._poll.register(rank.socket, select.POLLIN)
        if self._watch is not None:
            self._poll.register(self._watch, 0)  # hang-ups are always reported

    def _load_library(self) -> HostLibrary:
        plan = self.plan
        if plan.manifest.target.on_gpu:
            return HostLibrary(plan.section(HOST_LIBRARY), f"{plan.path}: {HOST_LIBRARY}")
        return Library(plan.section(plan.manifest.ranks[0].code), f"{plan.path}: code of rank 0")

    def _start(self, layout: StepLayout, memory_fd: int, host_fd: int) -> None:
        manifest = self.plan.manifest
        self._loaded = True
        for rank, program in zip(self._ranks.values(), manifest.ranks, strict=True):
            spans = [self._span(name) for name in (program.code, program.weights, manifest.shared_weights)]
            config = RankConfig(
                rank=program.rank,
                tp=len(manifest.ranks),
                threads=self.threads,
                parent=os.getpid(),
                plan=str(self.plan.path),
                plan_fd=self.plan.descriptor,
                memory_fd=memory_fd,
                code=spans[0],
                weights=spans[1],
                shared=spans[2],
                arena_bytes=program.arena_bytes,
                kv_bytes=program.kv_block_bytes * self.num_blocks,
                num_blocks=self.num_blocks,
                state_bytes=program.state_slot_bytes * self.num_slots,
                num_slots=self.num_slots,
                host_blocks=self.host_blocks,
                host_states=self.host_states,
                host_fd=host_fd,
                host_sizes=[other.kv_block_bytes for other in manifest.ranks],
                layout=layout,
                kind=manifest.target.kind,
                mmap=self._mmap,
            )
            rank.send(config.encode())
        size = sum(section.size for section in manifest.sections)
        self._wait(READY, LOAD_TIMEOUT + size / SLOWEST_DISK)

    def _span(self, name: str) -> tuple[int, int]:
        if name not in self.plan:
            return 0, 0
        entry = self.plan.entry(name)
        return entry.offset, entry.size

    def run(self, batch: StepBatch[C], sampler_params: np.ndarray | None = None) -> np.ndarray:
        """Computes a step: `begin` and `finish` in one."""
        self.begin(batch, sampler_params)
        return self.finish()

    def begin(self, batch: StepBatch[C], sampler_params: np.ndarray | None = None) -> None:
        """Has the ranks compute a step. Nothing but `finish` may follow; the batch is not looked at any more.
        `sampler_params` i32[S, len(SAMPLER_FIELDS)]: whose tokens the GPU is to choose, of an executor that `samples`.

        Raises ValueError for a batch larger than the plan's profile.
        """
        counts = self._memory.write(batch)
        if self.samples:
            self._memory.sampler_params[: counts[2]] = 0 if sampler_params is None else sampler_params
        self._num_rows = counts[2]
        self._send(STEP + COUNTS.pack(*counts))

    def finish(self) -> np.ndarray:
        """Waits for the step that was begun; its logits, f32[S, vocab], are a view that the next step overwrites. Rows
        whose tokens the GPU chooses have none; their tokens stand in `tokens`.

        Raises RankLost when a rank fails, after which the executor is closed.
        """
        self._wait(DONE, self.step_timeout)
        return self._memory.logits(self._num_rows)

    @property
    def tokens(self) -> np.ndarray:
        """i32[S]: what a GPU has chosen in the last step, where it was to; -1 as the sampler says it."""
        return self._memory.tokens[: self._num_rows]

    def copy(self, copies: Copies) -> float:
        """Moves blocks and states between pool and host memory; returns the seconds it took. Raises RankLost."""
        began = time.perf_counter()
        for message in copies.encode(MAX_DATAGRAM - len(COPY)):
            self._send(COPY + message)
            self._wait(DONE, self.step_timeout)
        return time.perf_counter() - began

    def _send(self, message: bytes) -> None:
        for rank in self._ranks.values():
            rank.send(message)

    def launch_seconds(self) -> list[np.ndarray]:
        """f64[launches] of each rank: how long each launch of the last step took, until all threads had done with it.

        Raises ValueError where the executor is not `timed`.
        """
        stamps = self._memory.stamps
        if not stamps.size:
            raise ValueError("launch_seconds() of an executor that is not timed")
        ranks = zip(stamps, self.plan.manifest.ranks, strict=True)
        return [np.diff(row[: rank.launches + 1]) * 1e-9 for row, rank in ranks]

    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [rank.process.pid for rank in self._ranks.values()]

    def descriptors(self) -> list[int]:
        """What becomes readable between two steps only when a rank has died; `check` then says which."""
        return list(self._ranks)

    def check(self) -> None:
        """Between two steps: raises RankLost if a rank has died, or was found stopped for STOPPED_SECONDS of calls."""
        for descriptor, _ in self._poll.poll(0):
            if (rank := self._ranks.get(descriptor)) is not None:
                self._lose(rank, rank.receive())
        stopped = [rank for rank in self._ranks.values() if rank.is_stopped()]
        now = time.monotonic()
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > STOPPED_SECONDS:
            self._give_up(f"{_name(stopped)} is stopped (SIGSTOP or a debugger)")

    def _wait(self, answer: bytes, timeout: float) -> None:
        """Waits until every rank has given this answer."""
        waiting = set(self._ranks)
        turns = stopped = 0
        while waiting:
            events = self._poll.poll(_TURN_SECONDS * 1000)
            for descriptor, _ in events:
                if descriptor == self._watch:
                    self.close()
                    raise ParentGone
                rank = self._ranks[descriptor]
                data = rank.receive()
                if data != answer:
                    self._lose(rank, data)
                waiting.discard(descriptor)
            if not events:
                self._on_wait()
                turns += 1
                stopped = self._check_progress(waiting, turns, stopped, timeout)

    def _check_progress(self, waiting: set[int], turns: int, stopped: int, timeout: float) -> int:
        """How many turns running a rank was found stopped, `stopped` of them before. Raises RankLost after too many.

        Its own turns are counted, not time: time also passes while this very process is stopped.
        """
        ranks, seconds = [self._ranks[descriptor] for descriptor in sorted(waiting)], turns * _TURN_SECONDS
        found = [rank for rank in ranks if rank.is_stopped()]
        stopped = stopped + 1 if found else 0
        if stopped * _TURN_SECONDS > STOPPED_SECONDS:
            self._give_up(f"{_name(found)} is stopped (SIGSTOP or a debugger); no answer for {seconds:.1f} s")
        if seconds > timeout:
            self._give_up(f"{_name(ranks)} gave no answer for {seconds:.1f} s (the timeout is {timeout:g} s)")
        return stopped

    def _lose(self, rank: _Rank, answer: bytes) -> None:
        """Ends everything because of one rank's answer, or because of its end (an empty answer)."""
        if answer[:1] != FAILED:
            self._give_up(f"rank {rank.number} {rank.ending(_CLOSE_SECONDS) or 'has closed its connection'}")
        kind, message = json.loads(answer[1:])
        if kind == "RankFailure":
            # It gave up waiting for others: the cause is the one that has died or does not move.
            for other in self._ranks.values():
                if other is not rank and (ending := other.ending(0.2)) is not None:
                    self._give_up(f"rank {other.number} {ending}")
            stopped = [other for other in self._ranks.values() if other.is_stopped()]
            if stopped:
                self._give_up(f"{_name(stopped)} is stopped (SIGSTOP or a debugger)")
        error = getattr(errors, kind, None)
        if isinstance(error, type) and issubclass(error, LlmcError):
            self.close()
            raise error(message)
        self._give_up(message)

    def _give_up(self, reason: str) -> None:
        self.close()
        raise RankLost(f"{self.plan.path}: {reason}")

    def close(self) -> None:
        """Ends the ranks, by force if they do not go; safe to call twice."""
        ranks, self._ranks = list(self._ranks.values()), {}
        if self._loaded and ranks and self.plan.manifest.comm_bytes and isinstance(self.library, Library):
            self.library.abort(self._memory.comm)  # a rank that waits for another would not see its socket close
        for rank in ranks:
            rank.socket.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for rank in ranks:
            if rank.is_stopped() or rank.ending(max(deadline - time.monotonic(), 0)) is None:
                rank.process.kill()
                rank.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name(ranks: list[_Rank]) -> str:
    return " and ".join(f"rank {rank.number}" for rank in ranks)
