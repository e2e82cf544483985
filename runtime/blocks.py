"""The KV pool's bookkeeping: which blocks are free, who holds one, and which full blocks can be found by their tokens.

Comes in: token ids, block numbers. Goes out: block numbers. Must not know: sequences, memory, the executor.

The prefix cache is a tree of full blocks. A block's key is its parent's serial and the exact tuple of its own tokens,
so that a hit means equal tokens from the first on: there is no hash that could collide. The first block's parent is a
root: sequences of different roots (another tenant, another salt) never find each other's blocks. A serial is given to
one key only, and a parent outlives its children: whoever holds a block holds its whole chain, `release` gives up
children first, and so the least recently released block, which is evicted first, never has a child. What is evicted may
be kept in a `lower` tier, under the same key and serial.

A block is written only by whoever allocated it, and never once it is full: a sequence that goes on from a shared prefix
writes into blocks of its own, and computes again the part of the prefix that fills no block. That takes the place of
copying on write.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

#: What stands for a block's parent where there is none: ROOT, or (tenant, salt) for a tree of its own.
Root = int | tuple[str, str]
ROOT = -1

#: A serial or a root, and a block's own tokens.
Key = tuple[Root, tuple[int, ...]]


class LowerTier(Protocol):
    """Where evicted blocks go."""

    def put(self, key: Key, serial: int, block: int) -> None:
        """A block is evicted; its content is there until the step being composed."""

    def supersede(self, key: Key) -> int | None:
        """The pool has a block of this key again. Returns the serial of the one kept here, which is given up."""


@dataclass
class CacheCounters:
    """What the prefix cache has done so far. `queries` and `hits` are prompt tokens looked up and found; of the blocks
    evicted, `lifetime_seconds` sums the time since each could be found first, `idle_seconds` that since it was last
    held.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    lifetime_seconds: float = 0.0
    idle_seconds: float = 0.0


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Each is free, held (counted), or idle: cached and held by nobody."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.counters = CacheCounters()
        self.lower: LowerTier | None = None
        self._clock = clock
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: low numbers first
        self._idle: OrderedDict[int, float] = OrderedDict()  # least recently released first, and when that was
        self._keys: list[Key | None] = [None] * num_blocks
        self._cached: dict[Key, int] = {}
        self._serials = [-1] * num_blocks  # of cached blocks
        self._next_serial = 0
        self._since = [0.0] * num_blocks  # when a cached block became one

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their tokens, held or not."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give out: the free and the idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """A block held once, its content undefined: a free one, or the idle one that nobody has used for longest.

        Raises IndexError when none is available; callers look at `num_available` first.
        """
        if self._free:
            block = self._free.pop()
        else:
            if not self._idle:
                raise IndexError(f"all {self.num_blocks} blocks are held")
            block, released = self._idle.popitem(last=False)
            key = self._keys[block]
            assert key is not None
            if self.lower is not None:
                self.lower.put(key, self._serials[block], block)
            self._forget(block)
            now = self._clock()
            self.counters.evictions += 1
            self.counters.lifetime_seconds += now - self._since[block]
            self.counters.idle_seconds += now - released
        self._holders[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Counts one more holder of each block; an idle one stops being available. Raises ValueError for a free one."""
        for block in blocks:
            if self._holders[block] == 0:
                if block not in self._idle:
                    raise ValueError(f"block {block} is free and cannot be held")
                del self._idle[block]
            self._holders[block] += 1

    def release(self, chain: Iterable[int]) -> None:
        """Gives up a sequence's blocks, named from first to last. Raises ValueError for one that nobody holds."""
        for block in reversed(tuple(chain)):
            count = self._holders[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            self._holders[block] = count
            if count == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = self._clock()

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._cached[key]
        self._keys[block] = None

    def key(self, parent: Root, tokens: tuple[int, ...]) -> Key:
        """By which a block of these tokens is found: `parent` is the cached block before it, or a root."""
        return (self._serials[parent] if isinstance(parent, int) and parent != ROOT else parent), tokens

    def serial(self, block: int) -> int:
        """A cached block's serial: the parent in its children's keys."""
        return self._serials[block]

    def commit(self, parent: Root, tokens: tuple[int, ...], block: int, serial: int | None = None) -> int:
        """Offers a full, held block for reuse; returns the block to use in its place from now on.

        That is another block if one of the same prefix is there already: it is held instead, and `block` is released.
        `parent` is what `commit` returned for the block before it, or the root; `serial` the one that it had before.
        """
        if not self.caching:
            return block
        key = self.key(parent, tokens)
        found = self._cached.get(key)
        if found is None:
            if serial is None and self.lower is not None:
                serial = self.lower.supersede(key)
            if serial is None:
                serial, self._next_serial = self._next_serial, self._next_serial + 1
            self._serials[block] = serial
            self._cached[key] = block
            self._keys[block] = key
            self._since[block] = self._clock()
            return block
        if found != block:
            self.hold((found,))
            self.release((block,))
        return found

    def retract(self, blocks: Iterable[int]) -> set[int]:
        """Takes back that these blocks can be found, and with them what goes on from them. Returns all
        of them: nobody may commit a block with one of them as its parent any more.
        """
        gone = {block for block in blocks if self._keys[block] is not None}
        while True:
            serials = {self._serials[block] for block in gone}
            after = {block for (parent, _), block in self._cached.items() if parent in serials} - gone
            if not after:
                break
            gone |= after
        for block in gone:
            self._forget(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)
        return gone

    def find(self, parent: Root, tokens: tuple[int, ...]) -> int | None:
        """The cached block of these tokens after that parent. It is not held yet."""
        return self._cached.get(self.key(parent, tokens)) if self._cached else None

    def match(self, tokens: array[int], most: int, root: Root = ROOT) -> list[int]:
        """The cached blocks that hold the start of `tokens`, at most `most` of them. They are not held yet."""
        blocks: list[int] = []
        parent, size = root, self.block_size
        for index in range(min(most, len(tokens) // size)):
            found = self.find(parent, tuple(tokens[index * size : (index + 1) * size]))
            if found is None:
                break
            blocks.append(found)
            parent = found
        return blocks

    def available_besides(self, blocks: Iterable[int]) -> int:
        """`num_available` once these cached blocks are held."""
        return self.num_available - sum(block in self._idle for block in blocks)

    def check(self, chains: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless the books are right, given every holder's chain of blocks."""
        counts = [0] * self.num_blocks
        for chain in chains:
            members = list(chain)
            assert len(set(members)) == len(members), f"a block is twice in one chain: {members}"
            for block in members:
                counts[block] += 1
        assert counts == self._holders, "holders do not match the chains"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._idle.keys(), "a block is both free and idle"
        for block, count in enumerate(counts):
            idle = block in self._idle
            assert (count == 0) == (idle or block in free), f"block {block}: {count} holders, idle {idle}"
            assert not idle or self._keys[block] is not None, f"idle block {block} cannot be found"
            assert block not in free or self._keys[block] is None, f"free block {block} can be found"
        assert len(free) + len(self._idle) + sum(count > 0 for count in counts) == self.num_blocks
        assert {key: block for block, key in enumerate(self._keys) if key is not None} == self._cached
        order = {block: place for place, block in enumerate(self._idle)}
        by_serial = {self._serials[block]: block for block in self._cached.values()}
        assert len(by_serial) == len(self._cached), "a serial was given twice"
        for (serial, tokens), block in self._cached.items():
            assert len(tokens) == self.block_size
            if serial == ROOT or isinstance(serial, tuple):
                continue
            assert serial in by_serial, f"block {block} has lost its parent of serial {serial}"
            parent = by_serial[serial]
            if parent in order:
                assert order.get(block, self.num_blocks) < order[parent], f"block {parent} would go before {block}"
