"""The memory plan: what lives at the same time never overlaps, and little is wasted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.builder.arena import ALIGN, Life, aligned, plan_memory


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    found = []
    for index in range(draw(st.integers(0, 24))):
        first = draw(st.integers(0, 12))
        found.append(Life(f"v{index}", draw(st.integers(1, 5000)), first, first + draw(st.integers(0, 6))))
    return found


def peak(values: list[Life]) -> int:
    """Bytes that any plan needs: the largest sum over the values alive during one launch."""
    return max((sum(aligned(v.nbytes) for v in values if v.first <= t <= v.last) for t in range(20)), default=0)


@given(lives())
def test_values_alive_together_never_overlap(values: list[Life]) -> None:
    arena = plan_memory(values)
    for a in values:
        assert arena.offsets[a.name] % ALIGN == 0
        assert arena.offsets[a.name] + a.nbytes <= arena.nbytes
        for b in values:
            if a.name < b.name and a.meets(b):
                start_a, start_b = arena.offsets[a.name], arena.offsets[b.name]
                assert start_a + a.nbytes <= start_b or start_b + b.nbytes <= start_a, (a, b)
    assert peak(values) <= arena.nbytes <= sum(aligned(v.nbytes) for v in values)


@given(lives(), st.randoms(use_true_random=False))
def test_the_order_of_values_does_not_matter(values: list[Life], random: object) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_memory(shuffled) == plan_memory(values)


def test_a_chain_reuses_two_places() -> None:
    chain = [Life(f"v{i}", 1000, i, i + 1) for i in range(10)]
    assert plan_memory(chain).nbytes == 2 * aligned(1000)


def test_lives_that_only_touch_in_one_launch_do_not_share() -> None:
    # A launch reads its input while it writes its output.
    arena = plan_memory([Life("in", 64, 0, 1), Life("out", 64, 1, 2)])
    assert arena.offsets["in"] != arena.offsets["out"]


def test_nothing_takes_no_memory() -> None:
    assert plan_memory([]).nbytes == 0
