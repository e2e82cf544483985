"""What every rank on a GPU does, whatever computes its steps: it checks them, fetches their logits, and moves blocks.

Comes in: steps. Goes out: logits in the step memory. Must not know: kernels, TensorRT, requests, scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from llmc.artifacts.cuda_program import CudaProgram
from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.trt_program import TrtProgram
from llmc.runtime.cuda import driver
from llmc.runtime.native import RankFailure, StepArrays, StepRefused
from llmc.runtime.step import Copies
from llmc.runtime.step_memory import StepMemory

if TYPE_CHECKING:
    from llmc.runtime.rank_main import RankConfig  # which is running as __main__

#: Address and bytes of the first of a pool's blocks or slots, or of one part of it: the others follow.
Part = tuple[int, int]


class GpuRank(ABC):
    """`bases`: where each space and each array of a step starts on the GPU. `blocks`: the parts of a block."""

    def __init__(
        self,
        config: RankConfig,
        program: CudaProgram | TrtProgram,
        bases: Mapping[str, int],
        blocks: Sequence[Part],
        memory: StepMemory,
    ) -> None:
        self.config, self._bases = config, bases
        self._limits = program
        self._stream = driver.Stream()
        driver.pin(*memory.extent)
        slot = (bases["states"], config.state_bytes // config.num_slots)
        self._pools = (
            _HostPool(blocks, config.host_blocks, self._stream),
            _HostPool([slot], config.host_states, self._stream),
        )

    def run(self, step: StepArrays, stamps: np.ndarray | None = None) -> None:
        """Runs one step and fills `step.tokens` where it is to choose, this rank's columns of `step.logits` where not:
        in the other rows stands anything. `stamps` as `native.Engine` has them, from the GPU's clock; where a step has
        fewer launches, the last time stands in the rest. Raises StepRefused, RankFailure.
        """
        self._check(step)
        with self._failing():
            self._compute(step, stamps is not None)
            self._download_logits(step)
            self._stream.wait()
        if stamps is not None:
            self._note(stamps)

    def copy(self, copies: Copies) -> None:
        """Moves blocks and states between pool and host memory: out first, as its blocks may be wanted by what comes
        in. Raises RankFailure.
        """
        with self._failing():
            for pool, pairs in zip(self._pools, (copies.blocks_out, copies.states_out), strict=True):
                pool.move_out(pairs)
            for pool, pairs in zip(self._pools, (copies.blocks_in, copies.states_in), strict=True):
                pool.move_in(pairs)
            self._stream.wait()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What the driver refuses is the rank's end, in its words."""
        try:
            yield
        except EnvironmentFault as error:
            raise RankFailure(f"rank {self.config.rank} of {self.config.tp}: {error}") from error

    @abstractmethod
    def _compute(self, step: StepArrays, timed: bool) -> None:
        """Has the stream compute the step's logits; `timed`, so that `_note` can be asked behind it."""

    @abstractmethod
    def _note(self, stamps: np.ndarray) -> None:
        """Fills the nanoseconds from the step's begin to each launch's end."""

    def _is_decode(self, step: StepArrays) -> bool:
        count = len(step.ids)
        return count == len(step.context_len) == len(step.rows) and count <= self._limits.max_num_seqs

    def _download_logits(self, step: StepArrays) -> None:
        """This rank's columns of the rows that the host wants, each run of them in one go."""
        first, columns = self._limits.columns
        wanted = np.ones(len(step.rows), bool) if step.sampler_params is None else step.sampler_params[:, 0] == 0
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            host = step.logits.ctypes.data + 4 * (begin * self._limits.vocab + first)
            device = self._bases["logits"] + 4 * columns * begin
            self._stream.download_rows(host, 4 * self._limits.vocab, device, 4 * columns, end - begin)

    def _check(self, step: StepArrays) -> None:
        """What compiled code of the cpu target checks: kernels stay within tables, cache and vocabulary."""
        p, tokens, seqs = self._limits, len(step.ids), len(step.context_len)
        counts = np.diff(step.query_start)
        blocks = -(-step.context_len // p.block_size)
        used = np.arange(step.block_tables.shape[1]) < blocks[:, None]
        fits = (
            1 <= tokens <= p.max_tokens
            and 1 <= seqs <= p.max_num_seqs
            and len(step.rows) <= p.max_num_seqs
            and step.query_start[0] == 0
            and step.query_start[-1] == tokens
            and bool((counts >= 1).all() and (step.context_len >= counts).all())
            and int(step.context_len.max()) <= p.max_seq_len
            and _within(step.ids, p.vocab)
            and _within(step.rows, tokens)
            and _within(step.block_tables[used], self.config.num_blocks)
            and (not p.state_slot_bytes or _within(step.state_slots, self.config.num_slots))
        )
        if not fits:
            raise StepRefused(
                f"rank {self.config.rank}: a step of {tokens} tokens, {seqs} sequences and {len(step.rows)} rows is "
                "outside the compiled ranges"
            )


def _within(values: np.ndarray, most: int) -> bool:
    return values.size == 0 or bool(values.min() >= 0 and values.max() < most)


class _HostPool:
    """Pinned memory for blocks, or states, that are out of their pool: a place holds all parts of one, in order."""

    def __init__(self, parts: Sequence[Part], places: int, stream: driver.Stream) -> None:
        self._parts, self._stream = parts, stream
        self._size = sum(size for _, size in parts)
        self._host = driver.allocate_pinned(self._size * places) if places else 0

    def move_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`pairs`: number in the pool, place."""
        for number, place in pairs:
            host = self._host + place * self._size
            for base, size in self._parts:
                self._stream.download(host, base + number * size, size)
                host += size

    def move_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`pairs` as above."""
        for number, place in pairs:
            host = self._host + place * self._size
            for base, size in self._parts:
                self._stream.upload(base + number * size, host, size)
                host += size
