"""The prefix cache's third tier: blocks that host memory has no place for, in a file, until they are wanted again.

Comes in: keys, places in host memory to write out and to fill. Goes out: which blocks are there, what they cost.
Must not know: sequences, the pool, ranks. Standard library only.

Keys, serials and the order of leaving are those of the shelf before it. Nothing here waits for the disk: a block is
written some time after it was stored, and read some time after it was asked for (`DiskIo`), and it counts as found only
once it has been read whole: a damaged record is a miss. A disk that takes no more, fails or does not answer ends this
tier, not the server.
"""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime.blocks import Key
from llmc.runtime.disk_io import DiskIo, Reading
from llmc.runtime.records import RecordFile

#: Weight of the latest measurement, and the most by which one counts, in averages: a disk may hesitate once.
_NEWEST, _MOST = 0.1, 8.0
#: A disk that has been at one record for so many seconds will not be waited for.
STALLED_SECONDS = 10.0


class _Record(NamedTuple):
    serial: int
    number: int


@dataclass(eq=False, slots=True)
class Fetch:
    """Blocks on their way to host memory: key, serial and place of each. It is `over` once they are there, as far as
    `reading` says, or nobody has to wait for them any more.
    """

    blocks: list[tuple[Key, int, int]]
    reading: Reading
    over: bool = False


class DiskShelf:
    """At most `count` records of `file`; `content` gives what lies in a place of host memory, to read or to fill.

    `hits`, `evictions`, `damaged` and `refused` (the disk was not quick enough to take them) count blocks. Raises
    EnvironmentFault where nothing can be written at all.
    """

    def __init__(
        self,
        file: RecordFile,
        count: int,
        content: Callable[[int], Sequence[memoryview]],
        start: Callable[[RecordFile], DiskIo] = DiskIo,
    ) -> None:
        self._folder = file.folder
        self._content = content
        self._entries: OrderedDict[Key, _Record] = OrderedDict()  # least recently stored first
        self._free = list(range(count - 1, -1, -1))
        self._fetches: deque[Fetch] = deque()  # not done yet, in the order in which they will be
        self.is_off = False
        self.hits = self.evictions = self.damaged = self.refused = 0
        self._write = self._read = 0.0  # seconds of a block
        self._probe(file)
        self._io = start(file)

    def __len__(self) -> int:
        return len(self._entries)

    def fileno(self) -> int:
        """Readable once a fetch is done."""
        return self._io.fileno()

    @property
    def write_and_read(self) -> float:
        """Seconds that keeping a block and getting it back takes."""
        return self._write + self._read

    @property
    def read_seconds(self) -> float:
        """Seconds that getting a block back takes."""
        return self._read

    @property
    def backlog_seconds(self) -> float:
        """Seconds until what was to be written has been: nothing is read before that."""
        return self._io.num_writing * self._write

    def find(self, key: Key) -> int | None:
        """The serial of the block of that key, which stays."""
        found = self._entries.get(key)
        return None if found is None else found.serial

    def store(self, key: Key, serial: int, place: int) -> None:
        """Has what lies in a place written out, unless the disk is behind; the block that was stored first gives way.
        The place is free at once.
        """
        if self.is_off:
            return
        number = self._free[-1] if self._free else next(iter(self._entries.values())).number
        if not self._io.write(number, serial, self._content(place)):
            self.refused += 1
            return
        if self._free:
            self._free.pop()
        else:
            self._entries.popitem(last=False)
            self.evictions += 1
        self._entries[key] = _Record(serial, number)

    def fetch(self, keys: Sequence[Key], places: Sequence[int]) -> Fetch:
        """Has the blocks of these keys, as far as they are here, read into places, one each; they are not here any more
        from now on.
        """
        blocks: list[tuple[Key, int, int]] = []
        records = []
        for key in keys[: len(places)]:
            if (found := self._entries.pop(key, None)) is not None:
                place = places[len(blocks)]
                blocks.append((key, found.serial, place))
                records.append((found.number, found.serial, self._content(place)))
                self._free.append(found.number)  # who writes there comes after this in the queue
        fetch = Fetch(blocks, Reading(records))
        self._fetches.append(fetch)
        self._io.read(fetch.reading)
        return fetch

    def collect(self) -> list[Fetch]:
        """The fetches that were done since the last call."""
        if not self.is_off and self._io.error is not None:
            self._turn_off(os.strerror(self._io.error.errno or 0))
        if not self.is_off and self._io.stalled_seconds() > STALLED_SECONDS:
            self._turn_off(f"the disk has not answered for {STALLED_SECONDS:g} s")
        done = []
        for job in self._io.done():
            if not isinstance(job, Reading):
                self._write = _average(self._write, job.seconds)
                continue
            fetch = self._fetches.popleft()
            assert fetch.reading is job
            fetch.over = True
            done.append(fetch)
            whole = sum(job.whole)
            self.hits += whole
            self.damaged += 0 if self.is_off else len(job.whole) - whole
            if whole:
                self._read = _average(self._read, job.seconds / len(job.whole))
        return done

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

    def fetched_places(self) -> list[int]:
        """Places that are being filled."""
        return [place for fetch in self._fetches for _, _, place in fetch.blocks]

    def close(self) -> None:
        """The file is gone with that."""
        self._io.close()

    def check(self, count: int) -> None:
        """Raises AssertionError unless each of `count` records is free or taken, once."""
        numbers = [*self._free, *(record.number for record in self._entries.values())]
        assert sorted(numbers) == list(range(count)), "a record on disk is lost"

    def _probe(self, file: RecordFile) -> None:
        """Measures a record before anything is in host memory."""
        began = time.perf_counter()
        try:
            file.write(0, 0, self._content(0))
        except OSError as error:
            raise EnvironmentFault(
                f"--kv-disk {file.folder}: cannot write there: {error.strerror}; choose a disk with room"
            ) from error
        written = time.perf_counter()
        file.read(0, 0, self._content(0))
        self._write, self._read = written - began, time.perf_counter() - written

    def _turn_off(self, why: str) -> None:
        self.is_off = True
        self._io.stop()
        self.clear()
        for fetch in self._fetches:
            fetch.over = True  # its places are not free before it is done
        print(
            f"warning: --kv-disk {self._folder}: {why}; evicted prefixes are not kept there any more",
            file=sys.stderr,
            flush=True,
        )


def _average(so_far: float, latest: float) -> float:
    return so_far + (min(latest, _MOST * so_far) - so_far) * _NEWEST
