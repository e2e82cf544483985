"""The shelf keeps what the pool evicts, gives room to preempted sequences, and finds nothing that is not there."""

from __future__ import annotations

from array import array

from llmc.runtime.blocks import ROOT
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.parking import Parking
from llmc.runtime.shelf import Shelf, Shelved
from tests.unit.runtime.scheduling import alone, answer, make, sequence


def key(number: int, parent: int | tuple[str, str] = ROOT) -> tuple:
    return parent, (number, number)


def test_the_least_recently_shelved_goes_first() -> None:
    shelf = Shelf(HostMemory(2), 2)
    for number in range(3):
        shelf.put(key(number), 10 + number, number)
    assert [shelf.find(key(number)) for number in range(3)] == [None, Shelved(11, 1), Shelved(12, 0)]
    assert (len(shelf), shelf.evictions) == (2, 1)
    assert shelf.find(key(1, ("tenant", "salt"))) is None
    # What is copied twice to one place holds the later in the end.
    assert shelf.memory.take_copies().blocks_out == [(0, 0), (1, 1), (2, 0)]


def test_a_place_is_not_filled_by_the_step_that_copies_from_it() -> None:
    memory = HostMemory(1)
    shelf = Shelf(memory, 2)
    shelf.put(key(1), 1, 5)
    assert shelf.pick([key(1)]) == [(1, 0)]
    shelf.put(key(2), 2, 6)  # there is no place: the one of the picked block is still wanted
    shelf.restore(0, 7)
    shelf.put(key(3), 3, 8)
    assert len(shelf) == 0
    assert memory.take_copies().blocks_in == [(7, 0)]
    memory.settle()
    shelf.put(key(3), 3, 8)
    assert shelf.find(key(3)) == Shelved(3, 0)


def test_preempted_sequences_come_before_evicted_prefixes() -> None:
    memory = HostMemory(3)
    shelf, parking = Shelf(memory, 4), Parking(memory, 4)
    for number in range(3):
        shelf.put(key(number), number, number)
    parked = parking.park(8, array("i", [3, 4]), 0)
    assert parked is not None
    assert (len(shelf), shelf.evictions) == (1, 2)
    parking.check([parked], shelf.places())


def test_copying_that_costs_more_than_computing_is_not_done() -> None:
    memory = HostMemory(4)
    shelf = Shelf(memory, 4)
    memory.observe_copy(1, 1.0)
    memory.observe_step(32, 32, 0.032)  # 4 ms a block
    shelf.put(key(1), 1, 5)
    assert len(shelf) == 0
    assert not shelf.is_worth([Shelved(1, 0)])


def test_a_prefix_that_was_evicted_is_not_computed_again() -> None:
    run = make(blocks=16, size=4, tokens=64, memory=HostMemory(40))
    for name, prompt in (("first", [1] * 32), ("other", [2] * 56), ("again", [1] * 32 + [3])):
        run.scheduler.add(sequence(name, prompt, max_tokens=4, ignore_eos=True))
        run.finish()
        assert answer(run.ended[name]) == alone(prompt, run.ended[name].params, 64)[0]
    assert run.ended["again"].cached_tokens == 32
    assert run.scheduler.shelf is not None
    assert run.scheduler.shelf.hits > 0


def test_a_block_of_broken_numbers_is_not_kept() -> None:
    run = make(blocks=16, size=4, tokens=64, memory=HostMemory(40), overlap=True)
    run.scheduler.add(sequence("broken", [1] * 32, max_tokens=4))
    batch = run.scheduler.schedule()
    assert batch is not None
    run.scheduler.abort("broken")  # while it is computed
    run.scheduler.add(sequence("other", [2] * 60, max_tokens=1))
    following = run.scheduler.schedule()  # takes its blocks, which go to the shelf
    assert run.scheduler.shelf is not None
    assert len(run.scheduler.shelf) > 0
    run.scheduler.update(batch, [-1], following)
    assert len(run.scheduler.shelf) == 0
