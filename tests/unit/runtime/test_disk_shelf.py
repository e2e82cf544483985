"""The disk tier: what comes back is what was written, or nothing; a full disk ends the tier; nothing is left behind."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime import records
from llmc.runtime.blocks import ROOT
from llmc.runtime.disk_shelf import DiskShelf
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.messages import Handling
from llmc.runtime.records import RecordFile, record_bytes
from llmc.runtime.shelf import Shelf, Shelved
from tests.unit.runtime.scheduling import FakeEngine, alone, answer, make, on_disk, sequence


def key(number: int) -> tuple:
    return ROOT, (number, number)


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
    disk = DiskShelf(file, 2, places.content)
    for number in range(3):
        places.fill(0, 10 + number)
        disk.store(key(number), 20 + number, 0)
    assert [disk.find(key(number)) for number in range(3)] == [None, 21, 22]
    assert disk.load(key(1), 1) == 21
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


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_record_is_a_miss(tmp_path: Path, data: st.DataObject) -> None:
    file, places = RecordFile(tmp_path, 16), Places(2)
    disk = DiskShelf(file, 2, places.content)
    for number in range(2):
        places.fill(0, number)
        disk.store(key(number), number, 0)
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
    assert disk.load(key(0), 1) is None
    assert (disk.damaged, disk.hits, disk.find(key(0))) == (1, 0, None)
    assert (disk.load(key(1), 1) == 1) == (kind != "cut")
    disk.check(2)
    disk.close()


def test_a_full_disk_ends_the_tier_with_one_line(
    file: RecordFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = DiskShelf(file, 4, Places(1).content)
    disk.store(key(0), 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "pwritev", _no_space)
        disk.store(key(1), 1, 0)
    disk.store(key(2), 2, 0)  # not tried again
    assert [disk.find(key(number)) for number in range(3)] == [None] * 3
    assert os.fstat(file.descriptor).st_size == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --kv-disk {file.folder}: No space left on device")


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
    assert shelf.pick([key(1)]) == []
    assert shelf.find(key(1)) == Shelved(1, None)
    memory.give_back([0])
    memory.settle()
    assert shelf.pick([key(1)]) == [(1, 0)]


def test_reading_that_costs_more_than_computing_is_not_done(tmp_path: Path) -> None:
    engine, memory = FakeEngine(4), HostMemory(4)
    shelf = Shelf(memory, 4, on_disk(tmp_path)(engine))
    memory.observe_step(32, 32, 1e-9)
    assert not shelf.is_worth([Shelved(0, None)])
    assert shelf.is_worth([Shelved(0, 0)])


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
    assert run.scheduler.shelf is not None
    assert run.scheduler.shelf.disk is not None
    assert run.scheduler.shelf.disk.hits > 0
