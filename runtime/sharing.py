"""How the blocks of a sequence get into the prefix cache and out of it, from its admission to its end.

Comes in: `Sequence`s that hold blocks, or are about to. Goes out: their block tables, `computed` and `committed` kept
in step with the pool. Must not know: who is served when. Standard library only.

Blocks can be found by others from the moment at which the step that fills them is composed: a step writes all keys and
values of a layer before it reads any, so even sequences of one step share a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from llmc.runtime.blocks import BlockPool, Key, Root
from llmc.runtime.core_sequence import Scheduled, Sequence
from llmc.runtime.disk_shelf import Fetch
from llmc.runtime.shelf import Shelf, Shelved


class Sharing:
    """The prefix cache of one pool, and what it has evicted to a `shelf`. Who is not `shareable` takes nothing from
    them and leaves nothing in them.
    """

    def __init__(self, pool: BlockPool, shelf: Shelf | None = None) -> None:
        self.pool = pool
        self.shelf = shelf
        pool.lower = shelf
        self._asked: list[tuple[Fetch, Sequence]] = []  # who waits for the disk

    def match(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a sequence without blocks can start from. They are not held yet."""
        # The last token is always computed, as its logits are wanted; and it never lands in a block that is shared.
        most = (len(sequence.tokens) - 1) // self.pool.block_size if sequence.shareable else 0
        return self.pool.match(sequence.tokens, most, sequence.root)

    def pick(self, sequence: Sequence, prefix: list[int]) -> list[tuple[int, int]]:
        """Serials and places of the shelved blocks that go on from this prefix, taken off the shelf, if copying them
        back is worth while.
        """
        if self.shelf is None:
            return []
        found = [*takewhile(lambda pair: pair[1].place is not None, self._shelved(sequence, prefix))]
        worth = found and self.shelf.is_worth([entry for _, entry in found])
        return self.shelf.pick([key for key, _ in found]) if worth else []

    def ask(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether a sequence that could begin now has to wait until the disk has read what goes on from this prefix.

        It does so once: what has left host memory again when it begins is computed.
        """
        if self.shelf is None or sequence.asked:
            return False
        found = self._shelved(sequence, prefix)
        entries = [entry for _, entry in found]
        if all(entry.place is not None for entry in entries) or not self.shelf.is_worth(entries):
            return False
        fetch = self.shelf.fetch([key for key, _ in found])
        if fetch is not None:
            sequence.asked = True
            self._asked.append((fetch, sequence))
        return fetch is not None

    def answered(self) -> list[Sequence]:
        """Those that had to wait for the disk, and have to no longer."""
        if self.shelf is not None:
            self.shelf.collect()
        over = [sequence for fetch, sequence in self._asked if fetch.over]
        if over:
            self._asked = [(fetch, sequence) for fetch, sequence in self._asked if not fetch.over]
        return [sequence for sequence in over if sequence.finish_reason is None]

    def _shelved(self, sequence: Sequence, prefix: list[int]) -> list[tuple[Key, Shelved]]:
        """What the shelf has of the blocks that go on from this prefix, one after the other."""
        found: list[tuple[Key, Shelved]] = []
        if self.shelf is None or not sequence.shareable or sequence.parked is not None:
            return found
        size = self.pool.block_size
        parent: Root = self.pool.serial(prefix[-1]) if prefix else sequence.root
        for i in range(len(prefix), (len(sequence.tokens) - 1) // size):
            key = parent, tuple(sequence.tokens[i * size : (i + 1) * size])
            if (entry := self.shelf.find(key)) is None:
                break
            found.append((key, entry))
            parent = entry.serial
        return found

    def restore(self, sequence: Sequence, picked: list[tuple[int, int]]) -> None:
        """A sequence that has begun goes on with blocks from the shelf, which come into its own."""
        for serial, place in picked:
            assert self.shelf is not None
            i = sequence.committed
            self.shelf.restore(place, sequence.blocks[i])
            sequence.blocks[i] = self.pool.commit(*self._key(sequence, i), sequence.blocks[i], serial)
            sequence.committed += 1
        found = len(picked) * self.pool.block_size
        sequence.computed += found
        self._count(sequence, found)

    def began(self, sequence: Sequence, prefix: int) -> None:
        """A sequence was admitted with so many blocks of others."""
        sequence.borrowed = sequence.committed = prefix
        sequence.computed = prefix * self.pool.block_size
        if sequence.shareable and not sequence.set_back:
            self.pool.counters.queries += len(sequence.tokens)
        self._count(sequence, sequence.computed)

    def catch_up(self, sequence: Sequence) -> None:
        """Takes over blocks that others have filled, or are about to, since the sequence was admitted."""
        pool, blocks = self.pool, sequence.blocks
        size, before = pool.block_size, sequence.computed
        while (
            sequence.shareable
            and sequence.computed == sequence.committed * size
            and sequence.computed + size < len(sequence.tokens)
            and (found := pool.find(*self._key(sequence, sequence.committed))) is not None
        ):
            pool.hold((found,))
            pool.release((blocks[sequence.committed],))
            blocks[sequence.committed] = found
            sequence.committed += 1
            sequence.borrowed += 1
            sequence.computed += size
        self._count(sequence, sequence.computed - before)

    def _count(self, sequence: Sequence, found: int) -> None:
        if not sequence.set_back:  # what is found after that, it may have computed itself
            sequence.cached_tokens += found
            self.pool.counters.hits += found

    def promise(self, sequence: Sequence, computed: int) -> None:
        """Offers the blocks that the step being composed will fill, as far as nobody else has them already. All their
        tokens are known.
        """
        size = self.pool.block_size
        while sequence.shareable and (sequence.committed + 1) * size <= computed:
            key = self._key(sequence, sequence.committed)
            if self.pool.find(*key) is not None:
                return  # not to be written twice in one step; `commit` takes it over afterwards
            self.pool.commit(*key, sequence.blocks[sequence.committed])
            sequence.committed += 1

    def commit(self, sequence: Sequence) -> None:
        """Once a step has begun: offers the blocks that it fills, or takes over those that others fill alike. One of
        which a token is not known yet has to wait for it.
        """
        full = min(sequence.computed, sequence.known)
        while sequence.shareable and (sequence.committed + 1) * self.pool.block_size <= full:
            i = sequence.committed
            sequence.blocks[i] = self.pool.commit(*self._key(sequence, i), sequence.blocks[i])
            sequence.committed += 1

    def retract(self, chunk: Scheduled, holders: Iterable[Sequence]) -> None:
        """After a step in which a chunk gave no token: what it wrote may be broken, and is not offered any more.

        Whoever of the `holders` has such a block already goes on with it, alone. A block that has changed hands since
        is taken back too: it costs its new holder no more than that.
        """
        size = self.pool.block_size
        gone = self.pool.retract(chunk.blocks[chunk.start // size : (chunk.start + len(chunk.tokens)) // size])
        for sequence in holders:
            if not gone.isdisjoint(sequence.blocks):
                sequence.shareable = False
        if self.shelf is not None and chunk.sequence.finish_reason is not None:
            self.shelf.clear()  # it had ended while it was computed, and its blocks may be anywhere

    def _key(self, sequence: Sequence, i: int) -> tuple[Root, tuple[int, ...]]:
        """Parent and tokens of a sequence's block number `i`."""
        size = self.pool.block_size
        parent = sequence.blocks[i - 1] if i else sequence.root
        return parent, tuple(sequence.tokens[i * size : (i + 1) * size])
