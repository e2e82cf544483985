"""Sequences whose prefix is on the disk: they stand aside while it is read, everybody else goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime import disk_shelf
from llmc.runtime.admission import Patience
from llmc.runtime.blocks import ROOT
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.messages import Handling
from tests.unit.runtime.scheduling import LateIo, Run, alone, answer, check, make, on_disk, sequence


def test_a_prefix_comes_back_from_the_disk(tmp_path: Path) -> None:
    run = make(blocks=16, size=4, tokens=64, memory=HostMemory(16), disk=on_disk(tmp_path))
    for name, prompt in (("first", [1] * 32), *((str(i), [2 + i] * 56) for i in range(3))):
        run.scheduler.add(sequence(name, prompt, max_tokens=4, ignore_eos=True))
        run.finish()
    prompt = [1] * 32 + [3]
    run.scheduler.add(sequence("salted", prompt, max_tokens=4, handling=Handling(cache_salt="x")))
    run.scheduler.add(sequence("again", prompt, max_tokens=4, ignore_eos=True))
    run.finish()
    assert answer(run.ended["again"]) == alone(prompt, run.ended["again"].params, 64)[0]
    assert (run.ended["again"].cached_tokens, run.ended["salted"].cached_tokens) == (32, 0)
    assert run.disk is not None
    assert run.scheduler.shelf is not None
    assert (run.disk.hits, run.scheduler.shelf.hits) == (8, 0)


def _evicted(tmp_path: Path, **options: object) -> tuple[Run, LateIo, list[int]]:
    """A scheduler of which the disk alone has the blocks of a prompt; that prompt."""
    run = make(blocks=16, size=4, tokens=64, memory=HostMemory(16), disk=on_disk(tmp_path), **options)
    for name, prompt in (("first", [1] * 32), *((str(i), [2 + i] * 56) for i in range(3))):
        run.scheduler.add(sequence(name, prompt, max_tokens=4, ignore_eos=True))
        run.finish()
    assert run.disk is not None
    assert isinstance(run.disk._io, LateIo)
    run.disk._io.catch_up()
    run.jobs_a_step = 0
    return run, run.disk._io, [1] * 32 + [3]


@pytest.mark.parametrize("overlap", [True, False])
def test_others_go_on_while_the_disk_reads(tmp_path: Path, overlap: bool) -> None:
    run, io, prompt = _evicted(tmp_path, overlap=overlap)
    run.scheduler.add(sequence("waits", prompt, max_tokens=4, ignore_eos=True))
    run.step()
    run.scheduler.add(sequence("twin", prompt, max_tokens=4, ignore_eos=True))
    for i in range(5):
        run.scheduler.add(sequence(f"other{i}", [5] * 3, max_tokens=8, ignore_eos=True))
    for _ in range(60):
        run.step()
    assert {f"other{i}" for i in range(5)} <= run.ended.keys()
    assert (run.scheduler.num_waiting, run.scheduler.waiting_by_class()["interactive"]) == (2, 2)
    assert not run.ended.keys() & {"waits", "twin"}
    io.catch_up()
    run.finish()
    for name in ("waits", "twin"):
        assert answer(run.ended[name]) == alone(prompt, run.ended[name].params, 64)[0]
        assert run.ended[name].cached_tokens == 32


def test_who_waits_for_the_disk_counts_in_the_queue(tmp_path: Path) -> None:
    now = [0.0]
    run, io, prompt = _evicted(tmp_path, patience=Patience(2, 5.0), clock=lambda: now[0])
    for name in ("first", "second", "third"):
        run.scheduler.add(sequence(f"{name} waits", prompt, max_tokens=4))
    assert run.scheduler.schedule() is None
    assert [(s.request_id, s.cause) for s in run.scheduler.turn_away()] == [("third waits", "queue_full")]
    now[0] = 5.1
    assert run.scheduler.schedule() is None
    assert [s.cause for s in run.scheduler.turn_away()] == ["queue_timeout"] * 2
    assert run.scheduler.num_waiting == 0
    io.catch_up()
    assert run.scheduler.schedule() is None
    check(run.scheduler)


def test_who_is_cancelled_while_the_disk_reads_leaves_nothing(tmp_path: Path) -> None:
    run, io, prompt = _evicted(tmp_path)
    run.scheduler.add(sequence("waits", prompt, max_tokens=4))
    run.step()
    assert run.scheduler.abort("waits") is not None
    check(run.scheduler)
    assert (run.scheduler.num_waiting, run.scheduler.schedule()) == (0, None)
    io.catch_up()
    assert run.scheduler.schedule() is None
    check(run.scheduler)
    assert run.disk is not None
    assert run.disk.fetched_places() == []


def test_a_disk_that_fails_meanwhile_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, io, prompt = _evicted(tmp_path)
    run.scheduler.add(sequence("waits", prompt, max_tokens=4, ignore_eos=True))
    run.step()
    monkeypatch.setattr(disk_shelf, "STALLED_SECONDS", -1.0)
    run.finish()  # the disk has not read anything
    assert answer(run.ended["waits"]) == alone(prompt, run.ended["waits"].params, 64)[0]
    assert run.ended["waits"].cached_tokens == 0
    io.catch_up()
    assert run.scheduler.schedule() is None
    check(run.scheduler)


def test_blocks_after_one_that_is_missing_are_not_restored_in_its_place(tmp_path: Path) -> None:
    run = make(blocks=16, size=4, tokens=64, memory=HostMemory(40), disk=on_disk(tmp_path))
    for name, prompt in (("first", [1] * 12), ("other", [2] * 60)):
        run.scheduler.add(sequence(name, prompt, max_tokens=2, ignore_eos=True))
        run.finish()
    shelf, parent, keys = run.scheduler.shelf, ROOT, []
    assert shelf is not None
    assert run.disk is not None
    for _ in range(3):
        keys.append((parent, (1, 1, 1, 1)))
        found = shelf.find(keys[-1])
        assert found is not None
        assert found.place is not None
        parent = found.serial
    # The second of the three is on disk alone, and is not waited for again.
    middle = shelf._entries.pop(keys[1])
    run.disk.store(keys[1], middle.serial, middle.place)
    shelf.memory.give_back([middle.place])
    again = sequence("again", [1] * 12 + [3], max_tokens=4, ignore_eos=True)
    again.asked = True
    run.scheduler.add(again)
    run.finish()
    assert answer(again) == alone([1] * 12 + [3], again.params, 64)[0]
    assert again.cached_tokens == 4
