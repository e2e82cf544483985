"""Admission's arithmetic: the peak of what grows, the average answer, the bounds of the queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.admission import AnswerLength, Growth, Patience, peak_blocks


def simulated(work: list[Growth], size: int) -> int:
    """The peak, by counting the blocks of every step."""
    peak = 0
    for step in range(max(growth.remaining for growth in work) + 1):
        going = [growth for growth in work if growth.remaining >= step]
        peak = max(peak, sum(-(-(growth.tokens + step) // size) for growth in going))
    return peak


@given(st.lists(st.builds(Growth, st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=8), st.integers(1, 8))
def test_the_peak_is_what_a_simulation_finds_and_a_block_each_at_most(work: list[Growth], size: int) -> None:
    exact = simulated(work, size)
    assert exact <= peak_blocks(work, size) <= exact + len(work)


def test_what_ends_gives_its_blocks_to_what_goes_on() -> None:
    # One has 40 tokens and ends at once; the other grows by 40 afterwards.
    assert peak_blocks([Growth(40, 0), Growth(0, 40)], 1) == 42
    assert peak_blocks([], 4) == 0


def test_without_answers_seen_no_growth_is_expected() -> None:
    answers = AnswerLength()
    assert answers.remaining(0, 10**6) == 0
    for _ in range(200):
        answers.ended(100)
    assert 95 <= answers.remaining(0, 10**6) <= 100
    assert answers.remaining(0, 7) == 7
    assert answers.remaining(500, 7) == 0


def test_the_bounds_of_the_queue() -> None:
    patience = Patience(3, 2.0)
    assert [patience.is_tried(n, [], 0.0) for n in (0, 3, 4)] == [False, False, True]
    assert [patience.is_tried(1, [10.0], now) for now in (12.0, 12.1)] == [False, True]
    assert patience.split([9.0, 10.0, 11.0, 11.0, 11.0, 11.0], 12.1) == (2, 1)
    assert patience.split([11.0] * 3, 12.1) == (0, 0)
    endless = Patience(None, None)
    assert not endless.is_tried(10**6, [0.0], 1e9)
    assert endless.split([0.0] * 9, 1e9) == (0, 0)


def test_a_client_is_told_when_its_turn_will_probably_come() -> None:
    patience = Patience(3, 2.0)
    assert patience.retry_after(50, 0.0) == 1  # nothing is known yet
    for second in range(10):
        patience.ended(second * 0.5)
    assert patience.retry_after(8, 4.5) == 4
    assert patience.retry_after(0, 4.5) == 1
    assert patience.retry_after(10**6, 4.5) == 60
