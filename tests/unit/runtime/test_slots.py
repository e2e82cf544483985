"""State slots: each is free or one sequence's, whatever is taken and given back in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.slots import StateSlots


@given(st.integers(1, 6), st.lists(st.integers(0, 7), max_size=40))
def test_a_slot_has_one_holder_and_none_is_lost(count: int, moves: list[int]) -> None:
    """Each move gives back the slot that stands there among those held, or takes one."""
    slots, held = StateSlots(count), []
    for move in moves:
        if move < len(held):
            slots.give_back(held.pop(move))
        elif slots.num_free:
            held.append(slots.take())
        assert len(set(held)) == len(held)
        assert slots.num_free == count - len(held)
        slots.check(held)


def test_what_nobody_holds_is_refused() -> None:
    slots = StateSlots(2)
    held = [slots.take(), slots.take()]
    assert held == [0, 1]
    with pytest.raises(IndexError, match="all 2 state slots are held"):
        slots.take()
    slots.give_back(1)
    for slot in (1, 2, -1):
        with pytest.raises(ValueError, match=f"state slot {slot} is not held"):
            slots.give_back(slot)
    with pytest.raises(AssertionError, match="lost, or held twice"):
        slots.check([0, 1])
    with pytest.raises(ValueError, match="0 state slots"):
        StateSlots(0)
