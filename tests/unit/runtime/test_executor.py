"""Ranks as processes: steps through real compiled code, and every way in which a rank can be lost."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.plan import Plan
from llmc.runtime import executor as executor_module
from llmc.runtime.executor import Executor, ParentGone, RankLost
from llmc.runtime.step import Chunk, StepBatch
from llmc.runtime.step_memory import StepLayout, StepMemory
from tests.unit.runtime.fake_engine import (
    VOCAB,
    alive,
    children,
    greedy,
    left_in_shared_memory,
    shared_memory,
    write_engine_plan,
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan.open(write_engine_plan(tmp_path_factory.mktemp("engine") / "fake.plan", tp=3))


def chunk(tokens: list[int], start: int, blocks: list[int], rows: int) -> Chunk:
    return Chunk(array("i", tokens), start, array("i", blocks), rows, 0)


def test_steps_of_several_sequences(plan: Plan) -> None:
    one, two = [3, 1, 4, 1, 5, 9], [2, 7, 1]
    with Executor(plan, num_blocks=8) as executor:
        first = executor.run(StepBatch([chunk(one[:4], 0, [6], 0), chunk(two, 0, [2], 1)])).copy()
        second = executor.run(StepBatch([chunk(one[4:], 4, [6, 0], 2), chunk([8], 3, [2], 1)])).copy()
    assert first.shape == (1, VOCAB)
    assert first.dtype == np.float32
    want = [greedy(one[:5], 1), greedy(one, 1), greedy([*two, 8], 1)]
    assert first.argmax(1).tolist() == greedy(two, 1)
    assert second.argmax(1).reshape(-1, 1).tolist() == want


@pytest.mark.parametrize(
    "chunks",
    [[], [([1] * 33, 0, 1)], [([1], 0, 1)] * 9, [([1] * 9, 0, 9)]],
    ids=["nothing", "tokens", "sequences", "rows"],
)
def test_a_batch_beyond_the_profile_is_refused(plan: Plan, chunks: list) -> None:
    memory_fd = os.memfd_create("test")
    layout = StepLayout(max_tokens=32, max_seqs=8, table_stride=24, vocab=VOCAB, comm_bytes=0)
    os.ftruncate(memory_fd, layout.size)
    memory = StepMemory(layout, memory_fd)
    os.close(memory_fd)
    with pytest.raises(ValueError, match=r"this plan takes from 1 token to \(32, 8, 8\)"):
        memory.write(StepBatch([chunk(tokens, start, [0] * 9, rows) for tokens, start, rows in chunks]))


def test_nothing_remains_after_closing(plan: Plan) -> None:
    before = shared_memory()
    descriptors = len(os.listdir("/proc/self/fd"))
    with Executor(plan, num_blocks=8) as executor:
        pids = [rank.process.pid for rank in executor._ranks.values()]
        assert len(pids) == 3
    executor.close()
    assert not any(alive(pid) for pid in pids)
    assert left_in_shared_memory(before) == set()
    del executor
    gc.collect()
    # The library stays loaded from its own anonymous file; nothing else stays open.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_is_named(plan: Plan, number: signal.Signals) -> None:
    with Executor(plan, num_blocks=8) as executor:
        processes = [rank.process for rank in executor._ranks.values()]
        processes[1].send_signal(number)
        with pytest.raises(RankLost, match=f"rank 1 was killed by signal {int(number)} \\({number.name}\\)"):
            executor.run(StepBatch([chunk([1], 0, [0], 1)]))
        assert all(process.poll() is not None for process in processes)


def test_a_death_between_steps_is_found(plan: Plan) -> None:
    with Executor(plan, num_blocks=8) as executor:
        executor.check()
        next(iter(executor._ranks.values())).process.kill()
        assert select.select(executor.descriptors(), [], [], 120)[0]
        with pytest.raises(RankLost, match="rank 0 was killed"):
            executor.check()


def test_a_hung_rank_ends_the_step(tmp_path: Path) -> None:
    plan = Plan.open(write_engine_plan(tmp_path / "hung.plan", tp=2, step_us=60_000_000))
    with Executor(plan, num_blocks=8, step_timeout=0.1) as executor:
        pids = [rank.process.pid for rank in executor._ranks.values()]
        with pytest.raises(RankLost, match=r"rank 0 and rank 1 gave no answer .* \(the timeout is 0.1 s\)"):
            executor.run(StepBatch([chunk([1], 0, [0], 1)]))
    assert not any(alive(pid) for pid in pids)


def test_a_step_that_nobody_wants_ends(tmp_path: Path) -> None:
    plan = Plan.open(write_engine_plan(tmp_path / "hung.plan", step_us=60_000_000))
    ours, theirs = socket.socketpair()
    with Executor(plan, num_blocks=8, watch=theirs.fileno()) as executor:
        ours.close()
        with pytest.raises(ParentGone):
            executor.run(StepBatch([chunk([1], 0, [0], 1)]))


def test_the_ranks_die_with_their_parent(plan: Plan, tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from llmc.artifacts.plan import Plan
from llmc.runtime.executor import Executor
executor = Executor(Plan.open({str(plan.path)!r}), num_blocks=8)
print("ready", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    pids = children(process.pid)
    assert len(pids) == 3
    process.kill()
    process.communicate()
    for pid in pids:
        descriptor = None
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 120)[0]
        os.close(descriptor)


def test_a_plan_without_room_for_kv(plan: Plan) -> None:
    with pytest.raises(EnvironmentFault, match=r"the KV pool does not fit: 1000000000000 blocks x 96 bytes"):
        Executor(plan, num_blocks=10**12)


def test_when_every_rank_fails_to_load_the_first_answer_is_the_only_message(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor_module, "available_memory", lambda: 1 << 62)
    with pytest.raises(EnvironmentFault, match=r"cannot allocate .* for the KV pool"):
        Executor(plan, num_blocks=10**13)
    assert capfd.readouterr().err == ""


def test_a_rank_imports_only_what_it_needs() -> None:
    code = (
        "import sys; before = {*sys.modules}; import llmc.runtime.rank_main; "
        "print(*{'msgspec', 'asyncio', 'zipfile'} & (sys.modules.keys() - before))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
