"""How a core ends, and what becomes of it when one of its processes does: nothing remains, nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from llmc.runtime.channel import ChannelClosed
from tests.unit.runtime.fake_engine import Client, alive, greedy, wait_until, write_engine_plan


@pytest.mark.parametrize("busy", [True, False])
def test_nothing_remains_when_the_front_end_goes(endless: Path, busy: bool) -> None:
    with Client(endless) as client:
        pids = [client.process.pid, *client.rank_pids()]
        if busy:
            client.submit("a", [1, 2], ignore_eos=True)
            client.wait(lambda: client.tokens["a"])
        client.channel.close()
        assert client.exit_code() == 0
        wait_until(lambda: not any(alive(pid) for pid in pids))


def test_nothing_remains_when_the_core_is_killed(endless: Path) -> None:
    with Client(endless) as client:
        pids = client.rank_pids()
        assert len(pids) == 2
        client.process.kill()
        with pytest.raises(ChannelClosed):
            client.wait(lambda: False)
        wait_until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_fails_what_runs_and_ends_the_core(endless: Path, rank: int) -> None:
    with Client(endless) as client:
        pids = client.rank_pids()
        for i in range(3):
            client.submit(str(i), [i], ignore_eos=True)
        client.wait(lambda: all(client.tokens.values()))
        client.signal_rank(rank, signal.SIGKILL)
        client.wait(lambda: client.fatal is not None)
        assert client.ended.keys() == client.tokens.keys()
        for output in client.ended.values():
            assert output.finish_reason == "error"
            assert f"rank {rank} was killed by signal 9 (SIGKILL); if the kernel ran out of memory, lower" in (
                output.error or ""
            )
        assert client.exit_code() == 1
        assert not any(alive(pid) for pid in pids)


def test_a_rank_killed_at_rest_is_noticed(plan_tp2: Path) -> None:
    with Client(plan_tp2) as client:
        client.signal_rank(1, signal.SIGKILL)
        client.wait(lambda: client.fatal is not None)
        assert "rank 1 was killed" in client.fatal.error
        assert client.exit_code() == 1


def test_a_stopped_rank_counts_as_lost(endless: Path) -> None:
    with Client(endless) as client:
        pids = client.rank_pids()
        client.submit("a", [1], ignore_eos=True)
        client.wait(lambda: client.tokens["a"])
        client.signal_rank(1, signal.SIGSTOP)
        client.wait(lambda: client.fatal is not None)
        assert "rank 1 is stopped (SIGSTOP" in (client.ended["a"].error or "")
        assert client.exit_code() == 1
        assert not any(alive(pid) for pid in pids)


def test_a_step_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    path = write_engine_plan(tmp_path / "hung.plan", tp=2, step_us=60_000_000)
    with Client(path, step_timeout=1.0) as client:
        assert client.fatal is not None
        assert "rank 0 and rank 1 gave no answer" in client.fatal.error
        assert client.exit_code() == 1


def test_signals_to_the_group_do_not_end_a_core(slow: Path) -> None:
    with Client(slow) as client:
        client.submit("a", [1], max_tokens=20, ignore_eos=True)
        client.wait(lambda: client.tokens["a"])
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(client.process.pid, number)
        client.wait_all()
        assert client.tokens["a"] == greedy([1], 20)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"kv_bytes": 10}, 2, "--kv-bytes 10 holds no block.*at least 768"),
        ({"num_blocks": 10**12}, 6, "the KV pool does not fit.*--kv-bytes [0-9]+ would fit"),
        ({"max_num_seqs": 9}, 2, "--max-num-seqs is 9.*at most 8"),
        ({"kv_host_bytes": 10}, 2, "--kv-host-bytes 10 holds nothing: a block of 4 tokens takes 32 bytes"),
        ({"kv_disk": "/"}, 2, "--kv-disk DIR and --kv-disk-bytes N go together"),
        ({"kv_disk": "/tmp", "kv_disk_bytes": 10}, 2, "--kv-disk-bytes 10 holds no block: .* 4096 bytes of the disk"),
        ({"kv_disk": "/none", "kv_disk_bytes": 10**6}, 6, "--kv-disk /none: cannot create a file there: No such file"),
        ({"kv_disk": "/tmp", "kv_disk_bytes": 10**6, "prefix_cache": False}, 2, "--kv-disk keeps blocks of the prefix"),
        ({"queue_timeout": 0.0}, 2, "--queue-timeout is 0.0; it must be more than 0"),
        ({"priority_weights": {"batch": 1.0}}, 2, "--priority-weights is .*must give 'interactive'"),
    ],
)
def test_a_plan_that_cannot_be_loaded_is_reported(plan: Path, options: dict, code: int, message: str) -> None:
    with Client(plan, **options) as client:
        assert client.fatal is not None
        assert re.search(message, client.fatal.error)
        assert client.exit_code() == code


def test_a_missing_plan_is_reported(tmp_path: Path) -> None:
    with Client(tmp_path / "none.plan") as client:
        assert client.fatal is not None
        assert "no such file" in client.fatal.error
        assert client.exit_code() == 3


def test_code_that_refuses_to_start_says_why(tmp_path: Path) -> None:
    path = write_engine_plan(tmp_path / "bad.plan", block_size_in_code=0)
    with Client(path) as client:
        assert client.fatal is not None
        assert "rank 0: block_size is 0" in client.fatal.error
        assert client.exit_code() == 6


def test_a_stopped_rank_is_noticed_at_rest(plan_tp2: Path) -> None:
    with Client(plan_tp2) as client:
        client.signal_rank(1, signal.SIGSTOP)
        client.wait(lambda: client.fatal is not None)
        assert "rank 1 is stopped (SIGSTOP" in client.fatal.error
        assert client.exit_code() == 1


@pytest.mark.parametrize("busy", [True, False])
def test_a_core_shows_that_it_lives(tmp_path: Path, busy: bool) -> None:
    path = write_engine_plan(tmp_path / "beats.plan", step_us=1_500_000 if busy else 0)
    with Client(path) as client:
        if busy:
            client.submit("a", [1], max_tokens=1)
        beats = client.beats
        client.wait(lambda: client.beats >= beats + 2)
