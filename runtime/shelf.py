"""The prefix cache's second tier: blocks that the pool has evicted, kept in host memory until they are wanted again.

Comes in: evicted blocks with their keys, keys that are looked up. Goes out: `Shelved` blocks, and copies to be made
before the next step. Must not know: sequences, processes. Standard library only.

A key is that of the pool: the serial of the block before, which is given to one exact run of tokens only, and the exact
tuple of its own. So here too a hit means equal tokens from the first on, under the same tenant and salt. A block is in
the pool or here, not in both. The least recently shelved goes first; the pool evicts children before their parents, so
that is never a parent whose children are wanted still.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from llmc.runtime.blocks import Key
from llmc.runtime.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class Shelved:
    """A full block out of the pool: the `serial` that it had, and its `place` in host memory."""

    serial: int
    place: int


class Shelf:
    """Uses whatever of `memory` nobody else wants. `hits` and `evictions` count blocks."""

    def __init__(self, memory: HostMemory, block_size: int) -> None:
        self.memory = memory
        self._block_size = block_size
        self._entries: OrderedDict[Key, Shelved] = OrderedDict()  # least recently shelved first
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
            self._entries[key] = Shelved(serial, place)
            self.memory.copies.blocks_out.append((block, place))

    def pick(self, key: Key) -> Shelved | None:
        """The block of that key, which is not here any more from now on; its place is still taken."""
        return self._entries.pop(key, None)

    def restore(self, picked: Shelved, block: int) -> None:
        """Copies a picked block into one of the pool before the next step."""
        self.memory.copies.blocks_in.append((block, picked.place))
        self.memory.give_back([picked.place])
        self.hits += 1

    def supersede(self, key: Key) -> int | None:
        """The pool gets a block of this key anew: it is not kept here any more. Returns the serial that it had."""
        found = self._entries.pop(key, None)
        if found is None:
            return None
        self.memory.give_back([found.place])
        return found.serial

    def find(self, key: Key) -> Shelved | None:
        """The block of that key, which stays."""
        return self._entries.get(key)

    def is_worth(self, blocks: int) -> bool:
        """Whether copying so many blocks back is cheaper than computing them."""
        return self.memory.is_worth(blocks * self._block_size, blocks, 1)

    def clear(self) -> None:
        """Keeps nothing."""
        self.memory.give_back(self.places())
        self._entries.clear()

    def places(self) -> Iterator[int]:
        """Where its blocks lie."""
        return (entry.place for entry in self._entries.values())

    def _make_room(self, count: int) -> list[int]:
        gone = [self._entries.popitem(last=False)[1] for _ in range(min(count, len(self._entries)))]
        self.evictions += len(gone)
        return [entry.place for entry in gone]
