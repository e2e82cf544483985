"""The pace of steps: within the budget once learnt, whatever the machine, and never below the least."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.pacing import Pace


@given(
    fixed=st.floats(0.0, 0.03),
    each=st.floats(1e-5, 1e-3),
    budget=st.floats(0.04, 0.2),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_steps_come_close_to_the_budget_and_stay_within(fixed: float, each: float, budget: float, seed: int) -> None:
    noise, pace = random.Random(seed), Pace(budget, 4, 4096)
    for step in range(80):
        # Often there is less to do than there is room for.
        tokens = pace.tokens() if step % 3 else noise.randint(1, pace.tokens())
        seconds = (fixed + each * tokens) * noise.uniform(0.95, 1.05)
        assert seconds <= budget
        pace.observe(tokens, seconds)
    fits = min((0.85 * budget - 1.05 * fixed) / each, 4096)
    assert pace.tokens() >= 0.6 * fits - 4


def test_it_follows_a_machine_that_slows_down() -> None:
    pace = Pace(0.05, 4, 512)
    for each in (1e-4, 5e-4):
        for _ in range(100):
            tokens = pace.tokens()
            pace.observe(tokens, 0.01 + each * tokens)
        assert (0.9 * 0.05 - 0.01) / each * 0.98 <= pace.tokens() <= (0.9 * 0.05 - 0.01) / each


def test_it_grows_step_by_step_from_the_least() -> None:
    pace = Pace(1.0, 8, 512)
    sizes = []
    for _ in range(8):
        sizes.append(pace.tokens())
        pace.observe(sizes[-1], 0.0001 * sizes[-1])
    assert sizes == [8, 16, 32, 64, 128, 256, 512, 512]


def test_steps_that_are_too_slow_anyway_take_the_least() -> None:
    pace = Pace(0.01, 8, 512)
    for _ in range(5):
        pace.observe(8, 1.0)
    assert pace.tokens() == 8


@pytest.mark.parametrize("arguments", [(0.0, 1, 2), (1.0, 0, 2), (1.0, 3, 2)])
def test_mistakes_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="a pace of"):
        Pace(*arguments)
