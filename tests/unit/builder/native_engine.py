"""Graphs compiled as a build compiles them, and run through the C ABI beside the interpreter.

`compile_graphs` gives an `Engines`; `Engines.run(inputs, context)` runs one step of a `Batch` on every rank at once.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.builder.cpu.cache import ObjectCache, default_folder
from llmc.builder.cpu.compile import Compiler
from llmc.builder.cpu.emit import emit
from llmc.builder.cpu.lower import lower
from llmc.builder.cpu.program import CpuLowered
from llmc.builder.cpu.toolchain import find_compiler
from llmc.builder.weights.stream import write_weights
from llmc.plugins.operator import StepContext
from llmc.profiles import load_target
from llmc.runtime.native import Library, RankMemory, StepArrays
from tests.unit.builder.weights_of import Tensors

PROFILE = ShapeProfile("test", (TokenRange(1, 1, 4), TokenRange(5, 64, 64)), 8, 256, 16)
#: Recurrent states, their memory garbage at first: one that is not cleared where a sequence begins shows.
SLOTS = 8


def aligned(data: bytes | int) -> np.ndarray:
    """u8 from a 64-byte boundary on: the bytes, or that many of garbage."""
    size = data if isinstance(data, int) else len(data)
    raw = np.full(size + 64, 0xCD, np.uint8)
    start = -raw.ctypes.data % 64
    part = raw[start : start + size]
    if not isinstance(data, int):
        part[:] = np.frombuffer(data, np.uint8)
    return part


def compile_all(lowered: Sequence[CpuLowered]) -> list[list[bytes]]:
    """Every rank's code of several models, compiled at once; the objects are cached between runs."""
    compiler = Compiler(find_compiler(), lowered[0].target, ObjectCache(default_folder()))
    sources = [emit(one, rank) for one in lowered for rank in range(len(one.programs))]
    libraries = iter(compiler.libraries(sources))
    return [[next(libraries) for _ in one.programs] for one in lowered]


def lower_for_test(compiled: Any, profile: ShapeProfile = PROFILE, target: str = "cpu") -> CpuLowered:
    return lower(compiled.graphs, profile, load_target(target), compiled.kv_dtype, compiled.vocab)


class Engines:
    """All ranks of one model in this process, each with its own memory."""

    def __init__(
        self, lowered: CpuLowered, codes: Sequence[bytes], tensors: Tensors, blocks: int, threads: int = 1
    ) -> None:
        self.lowered = lowered
        shared = io.BytesIO()
        write_weights(lowered.shared, tensors, shared)
        comm = aligned(bytes(lowered.comm_bytes)) if lowered.comm_bytes else None
        self.engines = []
        self.libraries = []
        for program, code in zip(lowered.programs, codes, strict=True):
            own = io.BytesIO()
            write_weights(program.weights, tensors, own)
            memory = RankMemory(
                rank=program.rank,
                tp=len(codes),
                threads=threads,
                weights=aligned(own.getvalue()),
                shared=aligned(shared.getvalue()),
                arena=aligned(program.arena_bytes),
                kv=aligned(program.kv_block_bytes * blocks),
                num_blocks=blocks,
                comm=comm,
                state=aligned(program.state_slot_bytes * SLOTS),
                num_slots=SLOTS,
            )
            self.libraries.append(Library(code, f"rank{program.rank}"))
            self.engines.append(self.libraries[-1].create(memory))

    def run(self, inputs: Mapping[str, np.ndarray], context: StepContext) -> np.ndarray:
        """f32[S, vocab]; every column must have been written."""
        logits = np.full((len(inputs["rows"]), self.lowered.vocab_size), np.nan, np.float32)
        step = StepArrays(
            ids=inputs["ids"],
            positions=inputs["positions"],
            query_start=context.query_start.astype(np.int32),
            context_len=context.context_len.astype(np.int32),
            block_tables=np.ascontiguousarray(context.block_tables),
            state_slots=np.ascontiguousarray(context.state_slots),
            rows=inputs["rows"].astype(np.int32),
            logits=logits,
        )
        errors: list[BaseException] = []

        def work(engine: Any) -> None:
            try:
                engine.run(step)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(engine,)) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return logits

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
