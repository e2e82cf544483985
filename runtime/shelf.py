"""The prefix cache's second tier: blocks that the pool has evicted, kept in host memory until they are wanted again.

Comes in: evicted blocks with their keys, keys that are looked up. Goes out: `Shelved` blocks, and copies to be made
before the next step. Must not know: sequences, processes. Standard library only.

A key is that of the pool: the serial of the block before, which is given to one exact run of tokens only, and the exact
tuple of its own. So here too a hit means equal tokens from the first on, under the same tenant and salt. A block is in
the pool or here, not in both. The least recently shelved goes first; the pool evicts children before their parents, so
that is never a parent whose children are wanted still. Where there is a disk, it goes there, and comes back onto this
shelf once somebody has asked for it and the disk has read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.runtime.blocks import Key
from llmc.runtime.disk_shelf import DiskShelf, Fetch
from llmc.runtime.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class Shelved:
    """A full block out of the pool: the `serial` that it had, and its `place` in host memory; None: it is on
    disk, or on its way from there.
    """

    serial: int
    place: int | None


class _Entry(NamedTuple):
    serial: int
    place: int
    fetched: bool = False  # from the disk


class Shelf:
    """Uses whatever of `memory` nobody else wants; what has to leave it goes to `disk`. `hits` and `evictions` count
    blocks of host memory; who came from the disk is a hit of the disk's.
    """

    def __init__(self, memory: HostMemory, block_size: int, disk: DiskShelf | None = None) -> None:
        self.memory = memory
        self.disk = disk
        self._block_size = block_size
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # least recently shelved first
        #: Serial of each block that the disk is to read, and what it comes with, in the order of reading.
        self._coming: dict[Key, tuple[int, Fetch]] = {}
        self.hits = self.evictions = 0
        memory.reclaim = self._make_room

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Key, serial: int, block: int) -> None:
        """Keeps a block that the pool evicts, if a place can be had for it and copying is cheaper than computing."""
        if not self.memory.is_worth(self._block_size, 1, 2):
            return
        if (found := self.memory.take(1)) is not None:
            ((place,), _) = found
            self._entries[key] = _Entry(serial, place)
            self.memory.copy_out(block, place)

    def pick(self, keys: Iterable[Key]) -> list[tuple[int, int]]:
        """Serials and places of the blocks of these keys, as far as they can be had one after the other. They are not
        here any more from now on; their places are still taken.
        """
        picked = []
        for key in keys:
            if (entry := self._entries.pop(key, None)) is None:
                break
            self.hits += not entry.fetched
            picked.append((entry.serial, entry.place))
        return picked

    def fetch(self, keys: Sequence[Key]) -> Fetch | None:
        """Has the disk's blocks of these keys brought here, as far as there are places for them, which take none from
        these keys' own blocks. Returns what the disk reads last, None where nothing is on its way.
        """
        assert self.disk is not None
        own = [key for key in keys if key in self._entries]
        for key in reversed(own):
            self._entries.move_to_end(key)
        asked = frozenset(keys)
        coming = [fetch for key, (_, fetch) in self._coming.items() if key in asked]
        wanted = [key for key in keys if key not in self._entries and key not in self._coming]
        room = self.memory.num_free + len(self._entries) - len(own)
        places = self._places_for(min(len(wanted), room))
        if not places:
            return coming[-1] if coming else None
        fetch = self.disk.fetch(wanted, places)
        self.memory.give_back(places[len(fetch.blocks) :])
        self._coming.update((key, (serial, fetch)) for key, serial, _ in fetch.blocks)
        return fetch

    def _places_for(self, count: int) -> list[int]:
        """Places that may be filled at once, at most so many."""
        places: list[int] = []
        while len(places) < count and (found := self.memory.take(1)) is not None:
            ((place,), _) = found
            if self.memory.is_coming(place):
                self.memory.give_back([place])
                break
            places.append(place)
        return places

    def collect(self) -> None:
        """Takes what the disk has read since the last call, the first block of each prefix as the latest to leave."""
        if self.disk is None:
            return
        for fetch in self.disk.collect():
            for (key, serial, place), whole in zip(reversed(fetch.blocks), reversed(fetch.reading.whole), strict=True):
                wanted = self._coming.get(key, (serial, None))[1] is fetch
                if wanted:
                    del self._coming[key]
                if wanted and whole:
                    self._entries[key] = _Entry(serial, place, fetched=True)
                else:
                    self.memory.give_back([place])
        if self.disk.is_off:
            self._coming.clear()

    def restore(self, place: int, block: int) -> None:
        """Copies a picked block from its place into one of the pool before the next step."""
        self.memory.copies.blocks_in.append((block, place))
        self.memory.give_back([place])

    def supersede(self, key: Key) -> int | None:
        """The pool gets a block of this key anew: it is not kept here any more. Returns the serial that it had."""
        if (found := self._entries.pop(key, None)) is not None:
            self.memory.give_back([found.place])
            return found.serial
        if (coming := self._coming.pop(key, None)) is not None:
            return coming[0]
        return None if self.disk is None else self.disk.supersede(key)

    def find(self, key: Key) -> Shelved | None:
        """The block of that key, which stays."""
        if (found := self._entries.get(key)) is not None:
            return Shelved(found.serial, found.place)
        if (coming := self._coming.get(key)) is not None:
            return Shelved(coming[0], None)
        serial = None if self.disk is None else self.disk.find(key)
        return None if serial is None else Shelved(serial, None)

    def is_worth(self, found: Sequence[Shelved]) -> bool:
        """Whether bringing these blocks back is cheaper than computing them."""
        reading, on_disk = 0.0, sum(entry.place is None for entry in found)
        if self.disk is not None and on_disk:
            reading = self.disk.backlog_seconds + on_disk * self.disk.read_seconds
        return self.memory.is_worth(len(found) * self._block_size, len(found), 1, reading)

    def clear(self) -> None:
        """Keeps nothing."""
        self.memory.give_back([entry.place for entry in self._entries.values()])
        self._entries.clear()
        self._coming.clear()
        if self.disk is not None:
            self.disk.clear()

    def places(self) -> Iterator[int]:
        """Where its blocks lie, or will."""
        yield from (entry.place for entry in self._entries.values())
        if self.disk is not None:
            yield from self.disk.fetched_places()

    def _make_room(self, count: int) -> list[int]:
        places = []
        for _ in range(min(count, len(self._entries))):
            key, (serial, place, _) = self._entries.popitem(last=False)
            if self.disk is not None and not self.memory.is_coming(place) and self._is_worth_writing(self.disk):
                self.disk.store(key, serial, place)
            places.append(place)
        self.evictions += len(places)
        return places

    def _is_worth_writing(self, disk: DiskShelf) -> bool:
        return self.memory.is_worth(self._block_size, 1, 1, disk.write_and_read)
