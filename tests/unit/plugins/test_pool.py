"""The thread pool: all threads run every step, meet at every barrier, and sleep when there is nothing to do."""

import os
import time
from functools import cache

import numpy as np
import pytest

from llmc.plugins.cpu.call import CpuCall, Literal, Pointer, Product
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.harness import Library

#: Threads write their turn, meet, and check what the others wrote: a barrier that lets one through early is seen.
RELAY = """
inline void relay(const Ctx& c, int tid, int64_t turns, int32_t* slots, int32_t* errors) {
  for (int32_t turn = 1; turn <= turns; ++turn) {
    slots[16 * tid] = turn;
    c.barrier(tid);
    for (int other = 0; other < c.threads; ++other) errors[16 * tid] += slots[16 * other] != turn;
    c.barrier(tid);
  }
}
"""


@cache
def library() -> Library:
    args = (Product(("T",)), Pointer("out", 0), Pointer("out", 1))
    call = CpuCall("plugins/cpu/runtime.h", "relay", args, prelude=RELAY)
    # A step that ends as soon as it has begun, so that steps follow each other closely.
    empty = CpuCall("plugins/cpu/runtime.h", "relay", (Literal("0"), *args[1:]), prelude=RELAY)
    kinds = {Pointer("out", 0): "i32", Pointer("out", 1): "i32"}
    return Library([call, empty], ISAS[0], [kinds, kinds])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_nobody_passes_a_barrier_early(threads: int) -> None:
    slots, errors = (aligned(np.zeros(16 * threads, np.int32)) for _ in range(2))
    library().run(0, [], [slots, errors], threads, tokens=500, repeat=4)
    assert (slots[::16] == 500).all()
    assert not errors.any()


@pytest.mark.parametrize("threads", [2, 5])
def test_steps_follow_each_other(threads: int) -> None:
    slots, errors = (aligned(np.zeros(16 * threads, np.int32)) for _ in range(2))
    library().run(1, [], [slots, errors], threads, repeat=3000)
    assert not errors.any()


def test_an_idle_pool_burns_no_cpu() -> None:
    slots, errors = (aligned(np.zeros(48, np.int32)) for _ in range(2))
    library().run(0, [], [slots, errors], 3, tokens=2)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1  # of 1.0 that two spinning workers would take


def test_a_pool_ends_its_threads() -> None:
    # Calls with tp > 1 make a pool of their own and destroy it.
    comm = aligned(np.zeros(1 << 16, np.uint8))
    slots, errors = (aligned(np.zeros(64, np.int32)) for _ in range(2))
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        library().run(0, [], [slots, errors], 4, tokens=1, tp=2, comm=comm.ctypes.data, slot=64)
    assert not errors.any()
    assert len(os.listdir("/proc/self/task")) == before
