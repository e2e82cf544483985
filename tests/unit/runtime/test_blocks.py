"""The block pool: counted, cached by exact tokens, never out of step with its books."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmc.runtime.blocks import ROOT, BlockPool, Root

SIZE = 2


def fill(pool: BlockPool, tokens: list[int], root: Root = ROOT) -> list[int]:
    """Takes blocks for whole blocks of tokens and commits them; returns the chain."""
    chain: list[int] = []
    for i in range(0, len(tokens), pool.block_size):
        chain.append(pool.allocate())
        chain[-1] = pool.commit(chain[-2] if i else root, tuple(tokens[i : i + pool.block_size]), chain[-1])
    return chain


def test_released_blocks_are_found_by_their_tokens() -> None:
    pool = BlockPool(4, SIZE)
    chain = fill(pool, [1, 2, 3, 4])
    pool.release(chain)
    assert pool.num_available == 4
    assert pool.match(array("i", [1, 2, 3, 4, 5]), 9) == chain
    assert pool.match(array("i", [1, 2, 3, 4]), 1) == chain[:1]
    assert pool.match(array("i", [1, 2, 9, 4]), 9) == chain[:1]
    assert pool.match(array("i", [3, 4]), 9) == []  # the second block's tokens, without what was before them


def test_equal_tokens_after_different_ones_are_different_blocks() -> None:
    pool = BlockPool(4, SIZE)
    one, two = fill(pool, [1, 1, 7, 7]), fill(pool, [2, 2, 7, 7])
    assert not set(one) & set(two)
    pool.check([one, two])


def test_the_same_prefix_is_kept_once() -> None:
    pool = BlockPool(4, SIZE)
    one, two = fill(pool, [1, 1, 2, 2]), fill(pool, [1, 1, 2, 2])
    assert one == two
    assert pool.num_held == 2
    pool.check([one, two])


def test_eviction_takes_the_least_recently_released_and_leaves_before_parents() -> None:
    pool = BlockPool(4, SIZE)
    old, new = fill(pool, [1, 1, 2, 2]), fill(pool, [3, 3, 4, 4])
    pool.release(old)
    pool.release(new)
    assert pool.allocate() == old[1]
    assert pool.match(array("i", [1, 1, 2, 2]), 9) == old[:1]
    assert pool.allocate() == old[0]
    assert pool.match(array("i", [3, 3, 4, 4]), 9) == new
    assert pool.counters.evictions == 2


def test_a_reused_block_does_not_keep_its_old_children() -> None:
    pool = BlockPool(2, SIZE)
    pool.release(fill(pool, [1, 1, 2, 2]))
    pool.release(fill(pool, [3, 3, 2, 2]))
    assert pool.match(array("i", [1, 1, 2, 2]), 9) == []
    assert len(pool.match(array("i", [3, 3, 2, 2]), 9)) == 2


def test_a_held_block_is_not_evicted() -> None:
    pool = BlockPool(2, SIZE)
    chain = fill(pool, [1, 1])
    pool.hold(chain)
    pool.release(chain)
    pool.allocate()
    with pytest.raises(IndexError, match="all 2 blocks are held"):
        pool.allocate()


def test_each_root_has_a_tree_of_its_own() -> None:
    pool = BlockPool(8, SIZE)
    roots: list[Root] = [ROOT, ("a", ""), ("", "a"), ("a", "a")]
    chains = [fill(pool, [1, 1, 2, 2], root) for root in roots]
    assert len({block for chain in chains for block in chain}) == 8
    for root, chain in zip(roots, chains, strict=True):
        assert pool.match(array("i", [1, 1, 2, 2]), 9, root) == chain
    pool.check(chains)


def test_what_is_taken_back_goes_with_all_that_follows_from_it() -> None:
    pool = BlockPool(8, SIZE)
    stem = fill(pool, [1, 1, 2, 2, 3, 3])
    other = fill(pool, [1, 1, 2, 2, 4, 4])
    beside = fill(pool, [5, 5])
    pool.release(other)
    assert pool.retract([stem[1]]) == {stem[1], stem[2], other[2]}
    assert pool.match(array("i", [1, 1, 2, 2, 3, 3]), 9) == stem[:1]
    assert pool.find(ROOT, (5, 5)) == beside[0]
    pool.check([stem, beside])
    pool.release(stem)
    assert pool.num_available == 7
    assert pool.retract([stem[1]]) == set()


def test_lifetimes_are_counted_by_the_clock() -> None:
    now = [0.0]
    pool = BlockPool(1, SIZE, clock=lambda: now[0])
    chain = fill(pool, [1, 1])
    assert pool.num_cached == 1
    now[0] = 3.0
    pool.release(chain)
    now[0] = 10.0
    pool.allocate()
    found = pool.counters
    assert (found.evictions, found.lifetime_seconds, found.idle_seconds, pool.num_cached) == (1, 10.0, 7.0, 0)


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, SIZE, caching=False)
    chain = fill(pool, [1, 1])
    pool.release(chain)
    assert pool.match(array("i", [1, 1]), 9) == []
    pool.check([])


def test_mistakes_are_refused() -> None:
    pool = BlockPool(2, SIZE)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} was released more often"):
        pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} is free"):
        pool.hold([block])
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockPool(0, SIZE)


def test_check_sees_a_leak() -> None:
    pool = BlockPool(2, SIZE)
    pool.allocate()
    with pytest.raises(AssertionError, match="holders"):
        pool.check([])


class Traffic(RuleBasedStateMachine):
    """Chains that grow, share prefixes and go, checked against what each block was filled with."""

    @staticmethod
    def new_pool() -> BlockPool:
        return BlockPool(7, SIZE)

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.new_pool()
        self.chains: list[tuple[list[int], list[int]]] = []  # tokens, blocks
        self.content: dict[int, tuple[int, ...]] = {}  # what stands in a block: all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, tokens: list[int]) -> None:
        prefix = self.pool.match(array("i", tokens), 99)
        for i, block in enumerate(prefix):
            assert self.content[block] == tuple(tokens[: (i + 1) * SIZE]), "another sequence's block was found"
        if self.pool.blocks_for(len(tokens)) - len(prefix) > self.pool.available_besides(prefix):
            return
        self.pool.hold(prefix)
        self.chains.append(([], prefix))
        self.chains[-1][0].extend(tokens[: len(prefix) * SIZE])
        self.extend(tokens[len(prefix) * SIZE :], len(self.chains) - 1)

    def extend(self, tokens: list[int], index: int) -> None:
        have, blocks = self.chains[index]
        for token in tokens:
            if len(have) == len(blocks) * SIZE:
                if not self.pool.num_available:
                    return
                blocks.append(self.pool.allocate())
                self.content.pop(blocks[-1], None)
            have.append(token)
            if len(have) % SIZE == 0:
                self.content[blocks[-1]] = tuple(have)
                parent = blocks[-2] if len(blocks) > 1 else ROOT
                blocks[-1] = self.pool.commit(parent, tuple(have[-SIZE:]), blocks[-1])
                assert self.content[blocks[-1]] == tuple(have)

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        self.extend([token], data.draw(st.integers(0, len(self.chains) - 1)))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, blocks = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.release(blocks)

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check(blocks for _, blocks in self.chains)
        assert self.pool.num_held + self.pool.num_available == self.pool.num_blocks


class UncachedTraffic(Traffic):
    @staticmethod
    def new_pool() -> BlockPool:
        return BlockPool(7, SIZE, caching=False)


TestTraffic = Traffic.TestCase
TestUncachedTraffic = UncachedTraffic.TestCase
TestTraffic.settings = TestUncachedTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
