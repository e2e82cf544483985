"""The prefix cache's third tier: blocks that host memory has no place for, in a file, until they are wanted again.

Comes in: keys, places in host memory to write out and to fill. Goes out: which blocks are there, what they cost.
Must not know: sequences, the pool, ranks. Standard library only.

Keys, serials and the order of leaving are those of the shelf before it. A block is written and read by the core, while
the ranks compute, and it counts as found only once it has been read whole: a damaged record is a miss. A disk that
takes no more, or fails, ends this tier, not the server.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime.blocks import Key
from llmc.runtime.records import RecordFile

#: Weight of the latest measurement, and the most by which one counts, in averages: a disk may hesitate once.
_NEWEST, _MOST = 0.1, 8.0


class _Record(NamedTuple):
    serial: int
    number: int


class DiskShelf:
    """At most `count` records of `file`; `content` gives what lies in a place of host memory, to read or to fill.

    `hits`, `evictions` and `damaged` count blocks. Raises EnvironmentFault where nothing can be written at all.
    """

    def __init__(self, file: RecordFile, count: int, content: Callable[[int], Sequence[memoryview]]) -> None:
        self._file = file
        self._content = content
        self._entries: OrderedDict[Key, _Record] = OrderedDict()  # least recently stored first
        self._free = list(range(count - 1, -1, -1))
        self.hits = self.evictions = self.damaged = 0
        self._write = self._read = 0.0  # seconds of a block
        self._probe()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def write_and_read(self) -> float:
        """Seconds that keeping a block and getting it back takes."""
        return self._write + self._read

    @property
    def read_seconds(self) -> float:
        """Seconds that getting a block back takes."""
        return self._read

    def find(self, key: Key) -> int | None:
        """The serial of the block of that key, which stays."""
        found = self._entries.get(key)
        return None if found is None else found.serial

    def store(self, key: Key, serial: int, place: int) -> None:
        """Writes out what lies in a place; the block that was stored first gives way."""
        if not self._free:
            if not self._entries:
                return  # turned off
            self._free.append(self._entries.popitem(last=False)[1].number)
            self.evictions += 1
        number = self._free.pop()
        began = time.perf_counter()
        try:
            self._file.write(number, serial, self._content(place))
        except OSError as error:
            self._turn_off(error)
            return
        self._write = _average(self._write, time.perf_counter() - began)
        self._entries[key] = _Record(serial, number)

    def load(self, key: Key, place: int) -> int | None:
        """Fills a place with the block of that key, which is not here any more then; its serial. None if there is none,
        or it is damaged.
        """
        found = self._entries.pop(key, None)
        if found is None:
            return None
        self._free.append(found.number)
        began = time.perf_counter()
        if not self._file.read(found.number, found.serial, self._content(place)):
            self.damaged += 1
            return None
        self._read = _average(self._read, time.perf_counter() - began)
        self.hits += 1
        return found.serial

    def supersede(self, key: Key) -> int | None:
        """A higher tier has the block of that key again: gives it up, and returns its serial."""
        found = self._entries.pop(key, None)
        if found is None:
            return None
        self._free.append(found.number)
        return found.serial

    def clear(self) -> None:
        """Keeps nothing."""
        self._free += [record.number for record in self._entries.values()]
        self._entries.clear()

    def close(self) -> None:
        """The file is gone with that."""
        self._file.close()

    def check(self, count: int) -> None:
        """Raises AssertionError unless each of `count` records is free or taken, once."""
        numbers = [*self._free, *(record.number for record in self._entries.values())]
        assert sorted(numbers) == list(range(count)), "a record on disk is lost"

    def _probe(self) -> None:
        """Measures a record before anything is in host memory."""
        began = time.perf_counter()
        try:
            self._file.write(0, 0, self._content(0))
        except OSError as error:
            raise EnvironmentFault(
                f"--kv-disk {self._file.folder}: cannot write there: {error.strerror}; choose a disk with room"
            ) from error
        written = time.perf_counter()
        self._file.read(0, 0, self._content(0))
        self._write, self._read = written - began, time.perf_counter() - written

    def _turn_off(self, error: OSError) -> None:
        self._entries.clear()
        self._free.clear()
        with contextlib.suppress(OSError):
            self._file.discard()
        print(
            f"warning: --kv-disk {self._file.folder}: {error.strerror}; evicted prefixes are not kept there any more",
            file=sys.stderr,
            flush=True,
        )


def _average(so_far: float, latest: float) -> float:
    return so_far + (min(latest, _MOST * so_far) - so_far) * _NEWEST
