"""The order of service: by weight between classes, shortest and oldest within one, and nobody for ever passed over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.policy import LANES, FairShare, Policy, Queue


@dataclass(eq=False)
class Prompt:
    serial: int
    remaining: int
    priority: str = "interactive"


def test_shares_follow_the_weights() -> None:
    share = FairShare({"a": 3.0, "b": 1.0})
    given = {"a": 0, "b": 0}
    for _ in range(400):
        name = share.pick(["a", "b"])
        share.charge(name, 10)
        given[name] += 10
    assert given == {"a": 3000, "b": 1000}


def test_whoever_rested_has_saved_nothing_up() -> None:
    share = FairShare({"a": 1.0, "b": 1.0})
    for _ in range(100):
        share.charge(share.pick(["a"]), 10)
    picks = []
    for _ in range(6):
        picks.append(share.pick(["a", "b"]))
        share.charge(picks[-1], 10)
    assert picks.count("b") == 3


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_weights_must_be_positive(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        FairShare(weights)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.25, 1.0, 3.0]), min_size=2),
    st.lists(st.tuples(st.integers(1, 100), st.sets(st.sampled_from("abcd"))), min_size=1, max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_two_with_work_are_never_further_apart_than_a_grant_each(
    weights: dict[str, float], grants: list[tuple[int, set[str]]]
) -> None:
    # Goyal et al., theorem 1: over any time in which both have work, |served_a / w_a - served_b / w_b| is at most one
    # grant of each, by its weight. `a` and `b` here are the first two; the others come and go.
    share, largest = FairShare(weights), max(tokens for tokens, _ in grants)
    first, second = list(weights)[:2]
    served = dict.fromkeys(weights, 0.0)
    for tokens, others in grants:
        name = share.pick({first, second, *(others & weights.keys())})
        share.charge(name, tokens)
        served[name] += tokens / weights[name]
        bound = largest / weights[first] + largest / weights[second]
        assert abs(served[first] - served[second]) <= bound + 1e-9


def test_the_queue_finds_shortest_and_oldest() -> None:
    queue: Queue[Prompt] = Queue(["interactive", "batch"])
    a, b, c, d = Prompt(0, 9), Prompt(1, 2), Prompt(2, 2), Prompt(3, 1, "batch")
    for prompt in (c, a, d, b):
        queue.add(prompt)
    assert (queue.shortest("interactive"), queue.oldest("interactive")) == (b, a)
    assert (queue.shortest("batch"), queue.sizes()) == (d, {"interactive": 3, "batch": 1})
    b.remaining = 1000  # what it was added with counts
    queue.remove(b)
    assert queue.shortest("interactive") is c
    assert [*queue] == [a, c, d]
    with pytest.raises(ValueError, match="sequence 1 does not wait"):
        queue.remove(b)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.sampled_from(["interactive", "batch"])), max_size=40))
def test_the_queue_is_what_a_list_would_be(actions: list[tuple[bool, int, str]]) -> None:
    queue: Queue[Prompt] = Queue(["interactive", "batch"])
    members: list[Prompt] = []
    for serial, (add, number, name) in enumerate(actions):
        if add or not members:
            members.append(Prompt(serial, number, name))
            queue.add(members[-1])
        else:
            queue.remove(members.pop(number % len(members)))
        assert len(queue) == len(members)
        for kind in ("interactive", "batch"):
            own = [m for m in members if m.priority == kind]
            assert queue.shortest(kind) is min(own, key=lambda m: (m.remaining, m.serial), default=None)
            assert queue.oldest(kind) is min(own, key=lambda m: m.serial, default=None)


def test_a_document_and_short_prompts_both_go_on() -> None:
    policy: Policy[Prompt] = Policy({"interactive": 1.0})
    document, given = Prompt(0, 10**6), {"document": 0, "short": 0}
    for serial in range(1, 401):
        short = Prompt(serial, 8)
        chosen = policy.choose([document, short])
        policy.charge(chosen, 8)
        given["document" if chosen is document else "short"] += 8
    assert given == {"document": 800, "short": 2400}


@given(
    st.integers(1, 400),
    st.sampled_from(["interactive", "batch"]),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["interactive", "batch"])), min_size=1, max_size=20),
    st.integers(1, 32),
)
@settings(max_examples=100, deadline=None)
def test_every_prompt_is_served_within_a_bound(size: int, name: str, others: list[tuple[int, str]], grain: int) -> None:
    # Whatever keeps coming, the oldest prompt of a class gets its class's share times its lane's of all grants.
    weights = {"interactive": 3.0, "batch": 1.0}
    policy: Policy[Prompt] = Policy(weights)
    target = Prompt(0, size, name)
    share = weights[name] / sum(weights.values()) * LANES["oldest"] / sum(LANES.values())
    bound = size / share + 8 * grain / share
    work, stream = 0, [Prompt(serial, tokens, kind) for serial, (tokens, kind) in enumerate(others, 1)]
    while target.remaining:
        chosen = policy.choose([target, *stream])
        tokens = min(grain, chosen.remaining)
        policy.charge(chosen, tokens)
        chosen.remaining -= tokens
        work += tokens
        assert work <= bound
        for prompt in stream:  # as soon as one ends the next comes
            if not prompt.remaining:
                tokens, _ = others[(prompt.serial - 1) % len(others)]
                prompt.remaining, prompt.serial = tokens, prompt.serial + len(others)
