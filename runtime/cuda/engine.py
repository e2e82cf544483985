"""A rank on its GPU: memory, kernels, and steps, which it runs as `runtime.native.Engine` does.

Comes in: a plan's program and weights, steps. Goes out: tokens, and logits of the rows whose tokens the host chooses,
in the step memory. Must not know: requests, scheduling.

Decode steps are replayed as graphs. One is captured behind the step that first needs it: for so many sequences, the
next of the buckets, and for so long a context, the next power of two, as attention's launches depend on both. The
sequences that a bucket has too many are empty. All other steps are launched one by one, and decodes whose graph the
memory does not hold (see `graphs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.artifacts.cuda_program import CudaProgram, decode_program
from llmc.artifacts.plan import Plan
from llmc.runtime.cuda import driver
from llmc.runtime.cuda.buckets import bucket, context_bucket
from llmc.runtime.cuda.graphs import Graphs
from llmc.runtime.cuda.launches import Launches
from llmc.runtime.cuda.memory import DeviceMemory
from llmc.runtime.cuda.nccl import Communicator
from llmc.runtime.cuda.rank import GpuRank
from llmc.runtime.native import StepArrays
from llmc.runtime.step_memory import StepMemory

if TYPE_CHECKING:
    from llmc.runtime.rank_main import RankConfig  # which is running as __main__


def load(config: RankConfig) -> tuple[CudaEngine, StepMemory]:
    """A rank that is ready. Raises LlmcError where it cannot be."""
    driver.open_device(config.rank)
    memory = StepMemory(config.layout, config.memory_fd)
    plan = Plan.open(f"/proc/self/fd/{config.plan_fd}", verify=False)
    names = plan.manifest.ranks[config.rank]
    program = decode_program(plan.section(names.code), f"{config.plan}: {names.code}")
    device = DeviceMemory(
        program,
        _array(plan, names.weights),
        _array(plan, plan.manifest.shared_weights),
        config.kv_bytes,
        config.state_bytes,
    )
    functions = [driver.load_function(bytes(plan.section(k.section)), k.entry, k.shared) for k in program.kernels]
    return CudaEngine(config, program, device, functions, memory), memory


def _array(plan: Plan, name: str) -> np.ndarray:
    return np.frombuffer(plan.section(name) if name in plan else b"", np.uint8)


class CudaEngine(GpuRank):
    """See above."""

    def __init__(
        self,
        config: RankConfig,
        program: CudaProgram,
        device: DeviceMemory,
        functions: list[Any],
        memory: StepMemory,
    ) -> None:
        super().__init__(config, program, device.bases, [(device.bases["kv"], program.kv_block_bytes)], memory)
        self.program, self.device = program, device
        self._communicator = Communicator(config.rank, config.tp, memory.comm) if config.tp > 1 else None
        self._launches = [
            Launches(steps, program.kernels, functions, device.address, self._all_reduce) for steps in program.steps
        ]
        self._graphs = Graphs(self._stream, together=config.tp > 1)
        self._tokens = memory.tokens
        self._events: list[driver.Event] = []
        if memory.layout.stamps:
            self._events = [driver.Event() for _ in range(program.launches + 1)]

    def _all_reduce(self, address: int, count: int, dtype: str, stream: driver.Stream) -> None:
        assert self._communicator is not None
        self._communicator.all_reduce(address, count, dtype, stream)

    # ---- one step

    def _compute(self, step: StepArrays, timed: bool) -> None:
        if not timed and self._is_decode(step):
            self._replay(step)
        else:
            self._launch(step, timed)

    def _replay(self, step: StepArrays) -> None:
        size = bucket(len(step.ids), self.program.max_num_seqs)
        context = context_bucket(int(step.context_len.max()), self.program.max_seq_len)
        self.device.write(step, size)
        if self._graphs.replay((size, context)):
            return
        symbols = {"T": size, "S": size, "num_seqs": size, "max_context": context}
        self._enqueue(self._launches[0], symbols)
        if self._graphs.wants((size, context)):  # behind a run: kernels are loaded and ranks connected by it
            self._stream.wait()
            self._graphs.record((size, context), lambda: self._enqueue(self._launches[0], symbols))

    def _launch(self, step: StepArrays, timed: bool) -> None:
        self.device.write(step, 0)
        tokens = len(step.ids)
        symbols = {
            "T": tokens,
            "S": len(step.rows),
            "num_seqs": len(step.context_len),
            "max_context": int(step.context_len.max()),
        }
        chosen = next(
            launches
            for launches in self._launches
            if launches.steps.least <= tokens <= launches.steps.most
            and launches.steps.decode == (timed and self._is_decode(step))
        )
        self._enqueue(chosen, symbols, self._events if timed else None)

    def _enqueue(
        self, launches: Launches, symbols: Mapping[str, int], events: list[driver.Event] | None = None
    ) -> None:
        self.device.upload(self._stream, symbols["T"], symbols["num_seqs"], symbols["S"])
        self._timed = len(launches.steps.launches)
        launches.run(self._stream, symbols, events)
        if self._tokens.size:
            self._stream.download(self._tokens.ctypes.data, self.device.bases["tokens"], 4 * symbols["S"])

    def _note(self, stamps: np.ndarray) -> None:
        first = self._events[0]
        stamps[0] = 0
        for number in range(1, self._timed + 1):
            stamps[number] = self._events[number].nanoseconds_since(first)
        stamps[self._timed :] = stamps[self._timed]
