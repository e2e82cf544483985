"""The thread pool: all threads run every step, meet at every barrier, share what a launch divides, and sleep when there
is nothing to do."""

import os
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from llmc.plugins.cpu.call import CpuCall, Literal, Pointer, Product
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.harness import Library
from tests.unit.runtime.stopwatch import Stopwatch

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
#: Every unit is counted, and who took it. Thread 0 is slow: its first unit lasts until the others have done all the
#: rest, or, where they do not, half a minute.
DIVIDE = """
#include <unistd.h>
inline int64_t done(const int32_t* times, int64_t n) {
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += __atomic_load_n(times + i, __ATOMIC_RELAXED);
  return sum;
}
inline void divide(const Ctx& c, int tid, int64_t n, int32_t* times, int32_t* taken) {
  for (int round = 0; round < 3; ++round) {
    for (int64_t unit; (unit = c.take(n, tid)) >= 0; ++taken[16 * tid]) {
      if (tid == 0 && c.threads > 1)
        for (int turn = 0; turn < 30'000 && done(times, n) < (round + 1) * n - 1; ++turn) usleep(1000);
      __atomic_fetch_add(times + unit, 1, __ATOMIC_RELAXED);
    }
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
    divide = CpuCall("plugins/cpu/runtime.h", "divide", args, prelude=DIVIDE)
    kinds = {Pointer("out", 0): "i32", Pointer("out", 1): "i32"}
    return Library([call, empty, divide], ISAS[0], [kinds] * 3)


def threads() -> set[int]:
    """Of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def state_of(thread: int) -> str:
    """R: runs or wants to, S: sleeps."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


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


@pytest.mark.parametrize(("threads", "units"), [(1, 5), (2, 0), (2, 1), (2, 9), (3, 30), (8, 5)])
def test_every_unit_is_taken_once_between_two_barriers(threads: int, units: int) -> None:
    times, taken = aligned(np.zeros(max(units, 1), np.int32)), aligned(np.zeros(16 * threads, np.int32))
    library().run(2, [], [times, taken], threads, tokens=units)
    assert (times[:units] == 3).all()
    assert taken.sum() == 3 * units


def test_a_slow_thread_is_helped() -> None:
    times, taken = aligned(np.zeros(40, np.int32)), aligned(np.zeros(32, np.int32))
    library().run(2, [], [times, taken], 2, tokens=40)
    assert taken[0] <= 3  # its own share would be 20 a round


def test_an_idle_pool_burns_no_cpu() -> None:
    slots, errors = (aligned(np.zeros(48, np.int32)) for _ in range(2))
    before = threads()
    library().run(0, [], [slots, errors], 3, tokens=2)
    workers = threads() - before
    # Whoever spins is running, or waits for a processor.
    assert Stopwatch().wait(lambda: all(state_of(worker) == "S" for worker in workers), 10)
    time.sleep(0.5)
    assert all(state_of(worker) == "S" for worker in workers)


def test_a_pool_ends_its_threads() -> None:
    # Calls with tp > 1 make a pool of their own and destroy it.
    comm = aligned(np.zeros(1 << 16, np.uint8))
    slots, errors = (aligned(np.zeros(64, np.int32)) for _ in range(2))
    before = threads()
    for _ in range(50):
        library().run(0, [], [slots, errors], 4, tokens=1, tp=2, comm=comm.ctypes.data, slot=64)
    assert not errors.any()
    assert Stopwatch().wait(lambda: threads() <= before, 10)  # the kernel shows one that was joined for a moment more
