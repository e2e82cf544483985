"""Host memory for set-back sequences: places are never lost, and copying is chosen where it is cheaper."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.host_memory import HostMemory
from llmc.runtime.parking import Parked, Parking
from llmc.runtime.step import Copies

TABLE = array("i", [7, 3, 9, 1])


def test_what_is_parked_comes_back_where_it_is_wanted() -> None:
    parking = Parking(HostMemory(4, 1), 4, needs_state=True)
    parked = parking.park(9, TABLE, 5)
    assert parked is not None
    assert (parked.tokens, parked.blocks, parked.states, parking.num_used) == (9, [0, 1, 2], [0], 3)
    assert parking.memory.take_copies() == Copies([(7, 0), (3, 1), (9, 2)], [(5, 0)])
    assert parking.park(1, TABLE, 5) is None  # no place for a state
    # The first block was found in the prefix cache meanwhile.
    parking.restore(parked, array("i", [20, 21, 22]), 1, 6)
    assert parking.memory.take_copies() == Copies(blocks_in=[(21, 1), (22, 2)], states_in=[(6, 0)])
    assert not parking.memory.take_copies()
    parking.check([])


def test_without_room_nothing_is_parked() -> None:
    parking = Parking(HostMemory(2), 4)
    assert parking.park(9, TABLE, 0) is None
    assert parking.park(0, TABLE, 0) is None
    assert parking.park(8, TABLE, 0) is not None
    assert parking.parked == 1


def test_the_cheaper_way_is_taken() -> None:
    memory = HostMemory(100)
    # A copy takes 1 ms and 0.1 ms a block.
    memory.probe(lambda copies: 0.001 + 0.0001 * copies.num_blocks, 100)
    assert memory.is_worth(4, 1, 2)  # what computing costs is not known yet
    memory.observe_step(30, 32, 0.032)  # 1 ms a token
    assert not memory.is_worth(2, 1, 2)  # 2.2 ms against 2
    assert memory.is_worth(2, 1, 1)
    assert memory.is_worth(4, 1, 2)  # against 4
    memory.observe_step(1, 32, 1.0)  # mostly decodes: says nothing of prompts
    assert memory.is_worth(4, 1, 2)
    for _ in range(100):
        memory.observe_copy(1, 0.1)
    assert not memory.is_worth(4, 1, 2)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=40), st.booleans())
def test_places_are_free_or_taken_once(actions: list[tuple[bool, int]], states: bool) -> None:
    parking, held = Parking(HostMemory(10, 3), 4, needs_state=states), []
    table = array("i", range(10))
    for park, number in actions:
        if park:
            found: Parked | None = parking.park(number, table, number)
            held += [] if found is None else [found]
        elif held:
            parking.drop(held.pop(number % len(held)))
            if number % 2:
                parking.memory.settle()
        parking.check(held)


@given(*[st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)), max_size=20)] * 4)
def test_copies_are_the_same_after_the_wire_however_they_are_cut(
    out: list, states: list, back: list, more: list
) -> None:
    pieces = [Copies.decode(data) for data in Copies(out, states, back, more).encode(60)]
    assert [pair for piece in pieces for pair in piece.blocks_out] == out
    assert [pair for piece in pieces for pair in piece.states_out] == states
    assert [pair for piece in pieces for pair in piece.blocks_in] == back
    assert [pair for piece in pieces for pair in piece.states_in] == more
    kinds = [bool(p.blocks_out or p.states_out) for p in pieces]
    assert kinds == sorted(kinds, reverse=True), "something came in before everything was out"
