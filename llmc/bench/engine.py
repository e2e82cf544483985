"""A plan as a `System`: its executor alone, without scheduler, sampling or server.

Comes in: a plan and the works. Goes out: seconds. Must not know: peers, limits.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llmc.artifacts.plan import Plan
from llmc.artifacts.sampler_params import GREEDY
from llmc.bench.machine import Memory
from llmc.bench.work import Work, prompt
from llmc.profiles import load_cpu_target
from llmc.runtime.executor import Executor
from llmc.runtime.native import HostLibrary
from llmc.runtime.step import Chunk, StepBatch


class EngineSystem:
    """Sequences of each context keep their blocks, filled once; every decode starts anew behind the context."""

    def __init__(
        self, path: Path, works: Sequence[Work], steps: int, *, threads: int | None, timed: bool, mmap: bool
    ) -> None:
        began = time.perf_counter()
        self.plan = Plan.open(path, verify=False)
        profile, build = self.plan.manifest.profile, self.plan.manifest.build
        self._sequences: dict[int, list[array[int]]] = {}  # context -> block tables
        self._filled: set[tuple[int, int]] = set()  # context, number
        count = self._place(works, steps)
        self._executor = Executor(self.plan, threads=threads, num_blocks=count, timed=timed, verify=True, mmap=mmap)
        self.threads = self._executor.threads
        self._ids = prompt(profile.max_seq_len, self.plan.manifest.model.vocab_size)
        self._fill(1, array("i", [0]), 0)
        self.load = time.perf_counter() - began
        isa = self.plan.manifest.target.isa
        self.name = f"llmc {build.precision}{f' tp {build.tp}' if build.tp > 1 else ''}{_level(isa)}"

    def _place(self, works: Sequence[Work], steps: int) -> int:
        """Gives every sequence its blocks; returns how many there are."""
        profile = self.plan.manifest.profile
        used = 0
        for work in works:
            need = -(-min(work.context + steps, profile.max_seq_len) // profile.block_size)
            own = self._sequences.setdefault(work.context, [])
            while len(own) < work.batch:
                own.append(array("i", range(used, used + need)))
                used += need
        return max(used, 1)

    def run(self, work: Work, steps: int) -> float:
        """As in `System`."""
        tables = self._sequences[work.context][: work.batch]
        if work.kind == "prefill":
            start = time.perf_counter()
            self._fill(work.context, tables[0], 0)
            return time.perf_counter() - start
        longest = self.plan.manifest.profile.max_seq_len
        # The last step stands at the last position that there is.
        first = min(work.context, longest - steps)
        for number, table in enumerate(tables):
            if (work.context, number) not in self._filled:
                self._fill(work.context, table, number)
                self._filled.add((work.context, number))
        # As in a server: where a GPU can choose tokens, no logits come to the host.
        sampler_params = np.array([GREEDY] * len(tables), np.int32) if self._executor.samples else None
        start = time.perf_counter()
        for position in range(first, first + steps):
            token = self._ids[position : position + 1]
            batch = StepBatch([Chunk(token, position, table, 1, i) for i, table in enumerate(tables)])
            self._executor.run(batch, sampler_params)
        return (time.perf_counter() - start) / steps

    def _fill(self, count: int, table: array[int], slot: int) -> None:
        """Computes the first `count` tokens of a sequence, and the logits behind them."""
        size = self.plan.manifest.profile.max_num_batched_tokens
        for start in range(0, count, size):
            piece = self._ids[start : min(start + size, count)]
            self._executor.run(StepBatch([Chunk(piece, start, table, int(start + size >= count), slot)]))

    def launch_seconds(self) -> list[list[float]]:
        """Of the last step, by rank and launch; the system must be `timed`."""
        return [times.tolist() for times in self._executor.launch_seconds()]

    @property
    def library(self) -> HostLibrary:
        """The engine's code, loaded in this process too."""
        return self._executor.library

    def memory(self) -> Memory:
        """Of all ranks."""
        return Memory.of(self._executor.pids())

    @property
    def processes(self) -> str:
        """As in `System`. Who hands steps to the ranks is this process, which has the measurements' own memory."""
        count = len(self._executor.pids())
        return f"{count} rank process{'es' if count > 1 else ''}, without the one that hands out steps"

    def close(self) -> None:
        """Ends the ranks."""
        self._executor.close()


@contextmanager
def engine(
    path: Path,
    works: Sequence[Work],
    steps: int,
    *,
    threads: int | None = None,
    timed: bool = False,
    mmap: bool = True,
) -> Iterator[EngineSystem]:
    """The plan, ready for these works and up to `steps` decode steps in a row."""
    system = EngineSystem(path, works, steps, threads=threads, timed=timed, mmap=mmap)
    try:
        yield system
    finally:
        system.close()


def _level(isa: str) -> str:
    """What tells plans of several levels apart: nothing for the level that plain `cpu` means."""
    return "" if isa == load_cpu_target("cpu").isa else f" {isa.removeprefix('x86-64-')}"
