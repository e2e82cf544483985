"""The disk tier: what comes back is what was written, or nothing; a full disk ends the tier; nothing is left behind."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime import disk_io, disk_shelf, records
from llmc.runtime.blocks import ROOT
from llmc.runtime.disk_shelf import DiskShelf
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.records import RecordFile, record_bytes
from llmc.runtime.shelf import Shelf, Shelved
from tests.unit.runtime.scheduling import FakeEngine, LateIo, on_disk


def key(number: int) -> tuple:
    return ROOT, (number, number)


def shelf_of(file: RecordFile, count: int, places: Places) -> tuple[DiskShelf, LateIo]:
    """And its disk, which does nothing by itself."""
    ios: list[LateIo] = []

    def start(file: RecordFile) -> LateIo:
        ios.append(LateIo(file))
        return ios[0]

    return DiskShelf(file, count, places.content, start), ios[0]


def load(disk: DiskShelf, io: LateIo, number: int, place: int) -> int | None:
    """The serial of a block that is read at once."""
    fetch = disk.fetch([key(number)], [place])
    io.catch_up()
    assert disk.collect() == [fetch]
    return fetch.blocks[0][1] if fetch.reading.whole == [True] else None


class Places:
    """Host memory of two ranks."""

    def __init__(self, count: int) -> None:
        self.data = [bytearray(6 * count), bytearray(10 * count)]

    def content(self, place: int) -> list[memoryview]:
        return [memoryview(self.data[0])[6 * place :][:6], memoryview(self.data[1])[10 * place :][:10]]

    def fill(self, place: int, number: int) -> None:
        for part in self.content(place):
            part[:] = bytes([number]) * len(part)

    def read(self, place: int) -> bytes:
        return b"".join(self.content(place))


@pytest.fixture
def file(tmp_path: Path) -> RecordFile:
    return RecordFile(tmp_path, 16)


def test_a_block_comes_back_as_it_was(file: RecordFile) -> None:
    places = Places(2)
    disk, io = shelf_of(file, 2, places)
    for number in range(3):
        places.fill(0, 10 + number)  # while the block before it is not written yet
        disk.store(key(number), 20 + number, 0)
    assert [disk.find(key(number)) for number in range(3)] == [None, 21, 22]
    assert load(disk, io, 1, 1) == 21
    assert places.read(1) == bytes([11]) * 16
    assert (len(disk), disk.hits, disk.evictions, disk.find(key(1))) == (1, 1, 1, None)
    assert disk.supersede(key(2)) == 22
    disk.check(2)


def test_the_file_is_its_owners_and_has_no_name(file: RecordFile, tmp_path: Path) -> None:
    found = os.fstat(file.descriptor)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert (found.st_nlink, [*tmp_path.iterdir()]) == (0, [])
    assert not os.get_inheritable(file.descriptor)


def test_it_has_no_name_where_the_file_system_cannot_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(records.os, "open", without)
    found = os.fstat(RecordFile(tmp_path, 16).descriptor)
    assert (stat.S_IMODE(found.st_mode), found.st_nlink, [*tmp_path.iterdir()]) == (0o600, 0, [])


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"--kv-disk .*none: cannot create a file there: No such file"):
        RecordFile(tmp_path / "none", 16)


def test_what_a_slow_disk_cannot_take_is_forgotten(file: RecordFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_io, "_MOST_BYTES", 4 * 16)
    disk, io = shelf_of(file, 100, Places(1))
    for number in range(10):
        disk.store(key(number), number, 0)
    assert (len(disk), disk.refused, disk.evictions) == (4, 6, 0)
    io.catch_up()
    disk.collect()
    disk.store(key(10), 10, 0)
    assert (disk.find(key(10)), disk.refused) == (10, 6)
    disk.check(100)


@given(st.lists(st.tuples(st.sampled_from(["store", "fetch", "supersede", "work"]), st.integers(0, 5)), max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_asked_for_meanwhile_no_record_is_read_half(tmp_path: Path, jobs: list[tuple[str, int]]) -> None:
    file, places = RecordFile(tmp_path, 16), Places(1 + len(jobs))
    disk, io = shelf_of(file, 3, places)
    last: dict[int, int] = {}  # what was stored under each key last
    asked: dict[int, int] = {}  # what must come into each place
    for serial, (job, number) in enumerate(jobs):
        if job == "store" and disk.find(key(number)) is None:
            places.fill(0, serial)
            disk.store(key(number), serial, 0)
            last[number] = serial
        elif job == "fetch" and disk.find(key(number)) is not None:
            disk.fetch([key(number)], [1 + serial])
            asked[1 + serial] = last[number]
        elif job == "supersede":
            disk.supersede(key(number))
        elif job == "work":
            io.catch_up(number)
        disk.check(3)
    io.catch_up()
    for fetch in disk.collect():
        for (_, serial, place), whole in zip(fetch.blocks, fetch.reading.whole, strict=True):
            assert (whole, serial, places.read(place)) == (True, asked[place], bytes([asked[place]]) * 16)
            del asked[place]
    assert not asked
    assert disk.damaged == 0
    disk.close()


def test_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, begun = threading.Event(), threading.Event()

    class Gated(RecordFile):
        def read(self, number: int, tag: int, parts: Sequence[memoryview]) -> bool:
            if tag:  # not the probe
                begun.set()
                assert gate.wait(60)
            return super().read(number, tag, parts)

    places = Places(2)
    disk = DiskShelf(Gated(tmp_path, 16), 4, places.content)
    disk.store(key(1), 1, 0)
    fetch = disk.fetch([key(1)], [1])
    assert begun.wait(60)
    assert disk.collect() == []
    assert not fetch.over
    monkeypatch.setattr(disk_shelf, "STALLED_SECONDS", 0.0)
    assert disk.collect() == []
    assert (fetch.over, disk.is_off, disk.fetched_places()) == (True, True, [1])  # the place may still be written to
    assert "the disk has not answered for 0 s" in capsys.readouterr().err
    gate.set()
    assert select.select([disk.fileno()], [], [], 60)[0]
    assert disk.collect() == [fetch]
    assert disk.fetched_places() == []
    disk.close()


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_record_is_a_miss(tmp_path: Path, data: st.DataObject) -> None:
    file, places = RecordFile(tmp_path, 16), Places(2)
    disk, io = shelf_of(file, 2, places)
    for number in range(2):
        places.fill(0, number)
        disk.store(key(number), number, 0)
    io.catch_up()
    # Records 0 and 1, sealed: 16 bytes and the seal's 16.
    kind = data.draw(st.sampled_from(["flip", "cut", "swap"]))
    second = record_bytes(16)
    if kind == "flip":
        place = data.draw(st.integers(0, 31))
        (byte,) = os.pread(file.descriptor, 1, place)
        os.pwrite(file.descriptor, bytes([byte ^ data.draw(st.integers(1, 255))]), place)
    elif kind == "cut":
        os.ftruncate(file.descriptor, data.draw(st.integers(0, 31)))
    else:
        os.pwrite(file.descriptor, os.pread(file.descriptor, 32, second), 0)
    assert load(disk, io, 0, 1) is None
    assert (disk.damaged, disk.hits, disk.find(key(0))) == (1, 0, None)
    assert (load(disk, io, 1, 1) == 1) == (kind != "cut")
    disk.check(2)
    disk.close()


def test_a_full_disk_ends_the_tier_with_one_line(
    file: RecordFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, io = shelf_of(file, 4, Places(1))
    disk.store(key(0), 0, 0)
    io.catch_up()
    disk.store(key(1), 1, 0)
    fetch = disk.fetch([key(0)], [0])
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "pwritev", _no_space)
        io.catch_up()
    assert disk.collect() == [fetch]
    assert fetch.reading.whole == [False]
    disk.store(key(2), 2, 0)  # not tried again
    io.catch_up()
    disk.collect()
    assert [disk.find(key(number)) for number in range(3)] == [None] * 3
    assert os.fstat(file.descriptor).st_size == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --kv-disk {file.folder}: No space left on device")
    disk.check(4)


def _no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("short", [True, False])
def test_a_disk_that_is_full_from_the_start_is_refused(
    file: RecordFile, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    monkeypatch.setattr(records.os, "pwritev", (lambda *_: 5) if short else _no_space)
    with pytest.raises(EnvironmentFault, match=r"--kv-disk .*: cannot write there: .*; choose a disk with room"):
        DiskShelf(file, 4, Places(1).content)


def test_what_leaves_host_memory_goes_to_the_disk_once_it_is_there(tmp_path: Path) -> None:
    engine, memory = FakeEngine(2), HostMemory(2)
    disk = on_disk(tmp_path)(engine)
    io = disk._io
    assert isinstance(io, LateIo)
    shelf = Shelf(memory, 2, disk)
    for number in range(2):
        shelf.put(key(number), number, number)
    shelf.put(key(2), 2, 2)  # nothing was copied yet: block 0 is lost
    assert shelf.find(key(0)) is None
    engine.copy(memory.take_copies())
    memory.settle()
    shelf.put(key(3), 3, 3)
    assert [shelf.find(key(number)) for number in (1, 2, 3)] == [Shelved(1, None), Shelved(2, 0), Shelved(3, 1)]
    # The place that could be had is yet to be filled by a copy, so nothing can be read into it.
    shelf.pick([key(2)])
    assert shelf.fetch([key(1)]) is None
    assert shelf.find(key(1)) == Shelved(1, None)
    memory.give_back([0])
    memory.settle()
    fetch = shelf.fetch([key(1)])
    assert fetch is not None
    assert shelf.fetch([key(1)]) is fetch  # who else wants it waits for the same
    assert (shelf.find(key(1)), shelf.pick([key(1)]), len(disk)) == (Shelved(1, None), [], 0)
    io.catch_up()
    shelf.collect()
    assert fetch.over
    assert shelf.pick([key(1)]) == [(1, fetch.blocks[0][2])]


def test_who_wants_what_several_fetches_bring_waits_for_the_last_of_them(tmp_path: Path) -> None:
    engine, memory = FakeEngine(2), HostMemory(4)
    disk = on_disk(tmp_path)(engine)
    shelf = Shelf(memory, 2, disk)
    engine.content(0)
    for number in range(3):
        disk.store(key(number), number, 0)
    shelf.fetch([key(2)])
    last = shelf.fetch([key(0), key(1)])
    assert last is not None
    assert shelf.fetch([key(number) for number in range(3)]) is last
    disk._io.catch_up()  # type: ignore[attr-defined]
    shelf.collect()
    assert [serial for serial, _ in shelf.pick([key(number) for number in range(3)])] == [0, 1, 2]


@pytest.mark.parametrize("superseded", [True, False])
def test_a_block_that_is_computed_while_it_is_read_is_not_kept_twice(tmp_path: Path, superseded: bool) -> None:
    engine, memory = FakeEngine(2), HostMemory(2)
    disk = on_disk(tmp_path)(engine)
    shelf = Shelf(memory, 2, disk)
    engine.content(0)
    disk.store(key(1), 7, 0)
    assert shelf.fetch([key(1)]) is not None
    assert shelf.supersede(key(1)) == 7 if superseded else shelf.clear() is None
    assert shelf.find(key(1)) is None
    memory.check(shelf.places())
    disk._io.catch_up()  # type: ignore[attr-defined]
    shelf.collect()
    assert len(shelf) == 0
    memory.check(())


def test_reading_that_costs_more_than_computing_is_not_done(tmp_path: Path) -> None:
    engine, memory = FakeEngine(4), HostMemory(4)
    shelf = Shelf(memory, 4, on_disk(tmp_path)(engine))
    memory.observe_step(32, 32, 1e-9)
    assert not shelf.is_worth([Shelved(0, None)])
    assert shelf.is_worth([Shelved(0, 0)])


def test_reading_behind_much_that_is_to_be_written_is_not_waited_for(tmp_path: Path) -> None:
    engine, memory = FakeEngine(4), HostMemory(4)
    disk = on_disk(tmp_path)(engine)
    shelf = Shelf(memory, 4, disk)
    disk._write = disk._read = 1.0
    memory.observe_step(32, 32, 32.0)  # a block costs 4 s
    engine.content(0)
    for number in range(4):
        disk.store(key(number), number, 0)
    assert disk.backlog_seconds == 4.0
    assert not shelf.is_worth([Shelved(0, None)])
    assert shelf.is_worth([Shelved(0, 0)])
    disk._io.catch_up()  # type: ignore[attr-defined]
    disk.collect()
    assert disk.backlog_seconds == 0.0
    assert shelf.is_worth([Shelved(0, None)])
