"""all_reduce between real processes: the same bits everywhere, and nobody waits for ever."""

from __future__ import annotations

import ctypes
import functools
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

from llmc.artifacts.types import TensorType
from llmc.plugins.all_reduce import Attrs, infer, reference
from llmc.plugins.all_reduce import cpu as all_reduce_cpu
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer
from llmc.plugins.operator import StepContext
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.native_step import Launch, Rank, Step, build, source
from tests.unit.runtime.stopwatch import Stopwatch

COLUMNS, TOKENS = 37, 50
SLOT = all_reduce_cpu.slot_bytes(TOKENS, COLUMNS)
X = TensorType("f32", ("T", COLUMNS))
FORK = multiprocessing.get_context("fork")

# What linear does with a bias: each thread writes its part of the slot, the bias comes after the sum.
_BIASED = """
namespace llmc {
inline void biased_sum(const Ctx& c, int tid, const float* x, const float* bias, float* y) {
  const int64_t rows = c.step->num_tokens;
  const Share own = share(rows * 37, tid, c.threads);
  std::copy(x + own.first, x + own.last, c.comm->slot(c.comm->rank) + own.first);
  rank_all_reduce(*c.comm, tid, c.threads, [&] { c.barrier(tid); }, y, rows, 37, bias);
}
}
"""


def launches() -> list[Launch]:
    plain = all_reduce_cpu.launch(Attrs(), [X], [X], KernelEnv((1, TOKENS), (1, 1), tp=2))
    args = (Pointer("in", 0), Pointer("in", 1), Pointer("out", 0))
    biased = CpuCall("plugins/all_reduce/cpu.h", "biased_sum", args, prelude=_BIASED)
    return [Launch(plain, (X,), (X,)), Launch(biased, (X, TensorType("f32", (COLUMNS,))), (X,))]


@functools.cache
def library() -> dict[str, ctypes.CDLL]:
    return build(source(launches()))


def shared_memory(tp: int) -> np.ndarray:
    """Zeroed comm memory that forked processes share."""
    descriptor = os.memfd_create("comm")
    os.ftruncate(descriptor, all_reduce_cpu.comm_bytes(TOKENS, COLUMNS, tp))
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return np.frombuffer(memory, np.uint8)


def step_of(tokens: int) -> Step:
    return Step(np.array([0, tokens], np.int32), np.array([tokens], np.int32), np.zeros((1, 1), np.int32))


def partial(rank: int, turn: int) -> np.ndarray:
    rng = np.random.default_rng((turn, rank))
    return rng.standard_normal((1 + turn * 7 % TOKENS, COLUMNS)).astype(np.float32)


def start(count: int, body: Callable[[int], int]) -> list[BaseProcess]:
    """Forks `count` processes; each exits with what body(rank) returns."""
    library()
    ranks = [FORK.Process(target=lambda r=rank: os._exit(body(r))) for rank in range(count)]
    for process in ranks:
        process.start()
    return ranks


def exit_codes(processes: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    Stopwatch().wait(lambda: all(process.exitcode is not None for process in processes), seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


@pytest.mark.parametrize(
    ("tp", "threads", "isa"), [(2, 1, ISAS[0]), (2, 2, ISAS[-1]), (3, 1, ISAS[0]), (3, 3, ISAS[0])]
)
def test_every_rank_holds_the_sum_in_rank_order(tp: int, threads: int, isa: str) -> None:
    memory = shared_memory(tp)
    memory[64 : 64 * (tp + 1)].view(np.uint32)[::16] = 2**32 - 20  # the counters wrap during the test
    bias = np.linspace(-1, 1, COLUMNS).astype(np.float32)

    def body(rank: int) -> int:
        engine = Rank(library()[isa], launches(), threads, comm=(rank, tp, memory, SLOT))
        for turn in range(60):
            x = partial(rank, turn)
            y = np.full_like(x, np.nan)
            code = engine.call(turn % 2, step_of(len(x)), [x, bias][: 1 + turn % 2], [y])
            want = functools.reduce(np.add, [partial(r, turn) for r in range(tp)])
            want = want + bias if turn % 2 else want
            if code or not np.array_equal(y, want):
                return 1
        engine.close()
        return 0

    assert exit_codes(start(tp, body), 60) == [0] * tp


def test_a_killed_rank_fails_the_others_at_the_deadline() -> None:
    memory = shared_memory(3)
    memory[4:8].view(np.uint32)[0] = 3000  # deadline_ms, below the default of 10 s; the ranks meet sooner

    def body(rank: int) -> int:
        engine = Rank(library()[ISAS[0]], launches(), 2, comm=(rank, 3, memory, SLOT))
        for turn in range(10_000):
            if rank == 1 and turn == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            x = partial(rank, turn)
            code = engine.call(0, step_of(len(x)), [x], [np.empty_like(x)])
            if code:
                again = engine.call(0, step_of(len(x)), [x], [np.empty_like(x)])
                return code if again == code and turn == 5 else 1
        return 0

    assert exit_codes(start(3, body), 60) == [2, -signal.SIGKILL, 2]


def test_abort_ends_every_wait() -> None:
    memory = shared_memory(2)
    memory[4:8].view(np.uint32)[0] = 600_000

    def body(rank: int) -> int:
        engine = Rank(library()[ISAS[0]], launches(), 1, comm=(rank, 2, memory, SLOT))
        x = partial(rank, 1)
        return engine.call(0, step_of(len(x)), [x], [np.empty_like(x)])

    waiting = start(1, body)
    while waiting[0].is_alive() and not memory[64:68].any():  # until rank 0 has arrived
        time.sleep(0.01)
    time.sleep(0.2)
    assert waiting[0].is_alive()
    library()[ISAS[0]].test_abort(ctypes.c_void_p(memory.ctypes.data))
    assert exit_codes(waiting, 20) == [2]


def test_formulas_are_the_headers() -> None:
    lines = [
        '#include "plugins/cpu/rank_barrier.h"',
        f"static_assert(llmc::kCommHeaderBytes == {all_reduce_cpu.COMM_HEADER_BYTES});",
        f"static_assert(llmc::kMaxRanks == {all_reduce_cpu.MAX_RANKS});",
        "static_assert(offsetof(llmc::CommHeader, deadline_ms) == 4);",
        "static_assert(offsetof(llmc::CommHeader, arrival) == 64);",
    ]
    build("\n".join(["#include <cstddef>", *lines]), ISAS[:1])
    assert all_reduce_cpu.comm_bytes(TOKENS, COLUMNS, 1) == 0
    assert all_reduce_cpu.comm_bytes(3, 5, 2) == 4096 + 4 * 64
    with pytest.raises(ValueError, match="tp=17"):
        all_reduce_cpu.comm_bytes(1, 1, 17)


def test_operator() -> None:
    x = np.ones((2, 3), np.float32)
    context = StepContext(16, *np.zeros((3, 1), np.int32), tp=2, all_reduce=lambda part: part * 2)
    np.testing.assert_array_equal(reference(context, Attrs(), [x])[0], x * 2)
    assert infer(Attrs(), [X]) == (X,)
    with pytest.raises(ValueError, match="expected one f32 tensor"):
        infer(Attrs(), [TensorType("bf16", (2,))])
