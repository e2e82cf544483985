"""Scheduling: every request ends once, within the budgets, with the tokens it would have had alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UsageError
from llmc.runtime.admission import Patience
from llmc.runtime.blocks import BlockPool
from llmc.runtime.core_sequence import Scheduled, Sequence
from llmc.runtime.messages import Handling, SamplingParams
from llmc.runtime.pacing import Pace
from llmc.runtime.parking import Parking
from llmc.runtime.scheduler import Scheduler
from llmc.runtime.step import Copies, StepBatch

VOCAB, EOS = 11, 10


def next_token(tokens: list[int]) -> int:
    """The model: a function of every token so far."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
    return state % VOCAB


def alone(prompt: list[int], params: SamplingParams, max_seq_len: int) -> tuple[list[int], str]:
    """What a request must give, whatever happens around it."""
    tokens = list(prompt)
    limit = min(max_seq_len, len(prompt) + (params.max_tokens or max_seq_len))
    generated = 0
    while True:
        token = next_token(tokens)
        generated += 1
        stops = {EOS} if not params.ignore_eos else set()
        if token in stops | set(params.stop_token_ids) and generated > params.min_tokens:
            return tokens[len(prompt) :], "stop"
        tokens.append(token)
        if len(tokens) == limit:
            return tokens[len(prompt) :], "length"


@dataclass
class FakeEngine:
    """Keeps every block's content and computes a token only from what it reads back through the block table."""

    block_size: int
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # (block, slot) -> (position, token)
    states: dict[int, list[int]] = field(default_factory=dict)  # state slot -> what the sequence in it has read
    host: dict[int, list[tuple[int, int] | None]] = field(default_factory=dict)  # place -> a block's content
    host_states: dict[int, list[int]] = field(default_factory=dict)

    def copy(self, copies: Copies) -> None:
        for block, place in copies.blocks_out:
            self.host[place] = [self.memory.get((block, slot)) for slot in range(self.block_size)]
        for slot, place in copies.states_out:
            self.host_states[place] = self.states[slot]
        for block, place in copies.blocks_in:
            for slot, content in enumerate(self.host[place]):
                if content is None:
                    self.memory.pop((block, slot), None)
                else:
                    self.memory[block, slot] = content
        for slot, place in copies.states_in:
            self.states[slot] = self.host_states[place]

    def advance(self, chunk: Scheduled) -> list[int]:
        """The other memory: a state that starts anew at position 0 and otherwise goes on from what its slot holds."""
        known = self.states[chunk.state_slot] if chunk.start else []
        assert len(known) == chunk.start, f"the state in slot {chunk.state_slot} is not that of position {chunk.start}"
        self.states[chunk.state_slot] = [*known, *chunk.tokens]
        return self.states[chunk.state_slot]

    def run(self, batch: StepBatch[Scheduled]) -> list[int]:
        self.copy(batch.copies)
        written = Counter()
        for chunk in batch.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                place = chunk.blocks[position // self.block_size], position % self.block_size
                written[place] += 1
                self.memory[place] = position, token
        assert not written or max(written.values()) == 1, "two tokens of a step went to one place"
        tokens = []
        for chunk in batch.chunks:
            if chunk.rows:
                tokens.append(next_token(self.read(chunk)))
        return tokens

    def read(self, chunk: Scheduled) -> list[int]:
        found = []
        for position in range(chunk.start + len(chunk.tokens)):
            place = chunk.blocks[position // self.block_size], position % self.block_size
            kept, token = self.memory[place]
            assert kept == position, f"position {position} holds what belongs to {kept}"
            found.append(token)
        return found


@dataclass
class Run:
    """A scheduler, the fake engine, and what came of it."""

    scheduler: Scheduler
    engine: FakeEngine
    most_tokens: int
    most_seqs: int
    ended: dict[str, Sequence] = field(default_factory=dict)
    steps: int = 0

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        self.scheduler.check()
        if batch is None:
            return False
        assert 1 <= batch.num_tokens <= self.most_tokens
        assert len(batch.chunks) <= self.most_seqs
        assert len({id(c.sequence) for c in batch.chunks}) == len(batch.chunks)
        assert len({c.state_slot for c in batch.chunks}) == len(batch.chunks), "two sequences share a state slot"
        assert all(0 <= c.state_slot < self.most_seqs for c in batch.chunks)
        assert all(len(c.tokens) >= 1 for c in batch.chunks)
        tokens = self.engine.run(batch)
        if not self.scheduler.pool.caching:
            states = [self.engine.advance(chunk) for chunk in batch.chunks]
            assert tokens == [next_token(s) for s, c in zip(states, batch.chunks, strict=True) if c.rows]
        for one in batch.chunks:
            for other in batch.chunks:
                if one.sequence.root != other.sequence.root or not one.sequence.shareable:
                    assert one is other or not {*one.blocks} & {*other.blocks}, "a block went to another tenant"
        gained = self.scheduler.update(batch, tokens)
        self.scheduler.check()
        for sequence in gained:
            if sequence.finish_reason:
                self.end(sequence)
        self.steps += 1
        return True

    def end(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.ended, "ended twice"
        self.ended[sequence.request_id] = sequence

    def finish(self, bound: int = 20000) -> None:
        while self.step():
            assert self.steps < bound, "does not come to an end"


def make(
    *,
    blocks: int = 16,
    size: int = 4,
    seqs: int = 4,
    tokens: int = 16,
    length: int = 64,
    caching: bool = True,
    **options: Any,
) -> Run:
    pool = BlockPool(blocks, size, caching)
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_seq_len": length}
    scheduler = Scheduler(pool, **limits, weights={"interactive": 3.0, "batch": 1.0}, **options)
    return Run(scheduler, FakeEngine(size), tokens, seqs)


def sequence(name: str, prompt: list[int], handling: Handling = Handling(), **params: object) -> Sequence:  # noqa: B008
    return Sequence(name, prompt, SamplingParams(**params), (EOS,), 0, handling)  # type: ignore[arg-type]


def answer(found: Sequence) -> list[int]:
    return found.tokens[found.num_prompt :].tolist()


def test_a_step_mixes_decodes_first_with_a_chunk_of_a_prompt() -> None:
    run = make(tokens=8)
    run.scheduler.add(sequence("a", [1, 2, 3], max_tokens=9, ignore_eos=True))
    run.step()
    run.scheduler.add(sequence("b", list(range(10)), max_tokens=3, ignore_eos=True))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert [(c.sequence.request_id, len(c.tokens), c.rows) for c in batch.chunks] == [("a", 1, 1), ("b", 7, 0)]
    run.scheduler.update(batch, run.engine.run(batch))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert [(c.sequence.request_id, c.start, len(c.tokens), c.rows) for c in batch.chunks] == [
        ("a", 4, 1, 1),
        ("b", 7, 3, 1),
    ]


def test_requests_without_max_tokens_run_together() -> None:
    # Each could grow to the whole pool; they are admitted by what they need now.
    run = make(blocks=16, tokens=32, length=64)
    for i in range(4):
        run.scheduler.add(sequence(str(i), [i] * 8, ignore_eos=True))
    run.step()
    assert run.scheduler.num_running == 4
    run.finish()
    assert run.scheduler.preemptions > 0
    for i in range(4):
        assert answer(run.ended[str(i)]) == alone([i] * 8, SamplingParams(ignore_eos=True), 64)[0]


def test_whoever_was_chosen_and_did_not_fit_is_next() -> None:
    run = make(blocks=8, size=4, tokens=64, length=32)
    run.scheduler.add(sequence("a", [1] * 12, max_tokens=8, ignore_eos=True))
    run.step()
    run.scheduler.add(sequence("b", [2] * 24, max_tokens=4, ignore_eos=True))  # 6 blocks do not fit beside a's 4
    run.step()
    run.scheduler.add(sequence("c", [3], max_tokens=1, ignore_eos=True))  # would fit, and is shorter
    run.step()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (1, 2)
    run.finish()
    assert next(iter(run.ended)) == "a"
    for name, prompt, most in (("a", [1] * 12, 8), ("b", [2] * 24, 4), ("c", [3], 1)):
        assert answer(run.ended[name]) == alone(prompt, SamplingParams(max_tokens=most, ignore_eos=True), 32)[0]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        ([1] * 64, {}, "64 tokens of prompt and 1 to be generated are 65.*max_seq_len of 64"),
        ([1] * 60, {"max_tokens": 5}, "60 tokens of prompt and 5 .* 65.*max_seq_len of 64"),
        ([1] * 40, {}, "41, more than the 40 that the KV pool holds.*10 blocks.*--kv-bytes"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: list[int], params: dict, message: str) -> None:
    run = make(blocks=10, length=64)
    with pytest.raises(UsageError, match=message):
        run.scheduler.add(sequence("a", prompt, **params))
    assert not run.step()


def test_an_id_is_used_once() -> None:
    run = make()
    run.scheduler.add(sequence("a", [1]))
    with pytest.raises(ValueError, match="in use"):
        run.scheduler.add(sequence("a", [1]))


def test_length_ends_exactly_at_the_limit() -> None:
    run = make(blocks=4, size=4, length=16)
    run.scheduler.add(sequence("a", [1] * 15, ignore_eos=True))
    run.scheduler.add(sequence("b", [1] * 3, ignore_eos=True))
    run.finish()
    assert len(run.ended["a"].tokens) == 16
    assert len(run.ended["b"].tokens) == 16
    assert {s.finish_reason for s in run.ended.values()} == {"length"}


def test_stop_tokens_end_and_are_not_shown_but_not_before_min_tokens() -> None:
    prompt = [3, 1]
    stream, _ = alone(prompt, SamplingParams(ignore_eos=True, max_tokens=30), 64)
    stop = stream[4]
    first = stream.index(stop)
    later = next(i for i, token in enumerate(stream) if token == stop and i >= 5) if stop in stream[5:] else None
    run = make(blocks=32)
    run.scheduler.add(sequence("a", prompt, ignore_eos=True, stop_token_ids=(stop,), max_tokens=30))
    run.scheduler.add(
        sequence("b", prompt, ignore_eos=True, stop_token_ids=(stop,), max_tokens=30, min_tokens=first + 1)
    )
    run.finish()
    a, b = run.ended["a"], run.ended["b"]
    assert (answer(a), a.finish_reason, a.stop_token, a.generated) == (stream[:first], "stop", stop, first + 1)
    assert len(answer(b)) > first
    if later is not None:
        assert answer(b) == stream[: next(i for i in range(first + 1, 30) if stream[i] == stop)]


def test_a_row_without_a_token_ends_its_sequence_only() -> None:
    run = make()
    run.scheduler.add(sequence("a", [1] * 5, max_tokens=4))
    run.scheduler.add(sequence("b", [2] * 5, max_tokens=4, ignore_eos=True))
    batch = run.scheduler.schedule()
    assert batch is not None
    tokens = run.engine.run(batch)
    gained = run.scheduler.update(batch, [-1, tokens[1]])
    assert [s.finish_reason for s in gained] == ["error", None]
    run.scheduler.check()
    assert run.scheduler.pool.match(array("i", [1] * 4), 1) == []  # what may be broken is not given to others
    assert len(run.scheduler.pool.match(array("i", [2] * 4), 1)) == 1
    run.finish()
    assert answer(run.ended["b"]) == alone([2] * 5, SamplingParams(max_tokens=4, ignore_eos=True), 64)[0]


def test_a_repeated_prompt_is_computed_once_but_for_its_last_block() -> None:
    run = make(blocks=16, tokens=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    run.scheduler.add(sequence("a", prompt, max_tokens=1))
    run.finish()
    run.scheduler.add(sequence("b", prompt, max_tokens=1))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert [(c.start, len(c.tokens)) for c in batch.chunks] == [(4, 4)]  # never all: the last token's logits are wanted
    run.scheduler.update(batch, run.engine.run(batch))
    assert (run.scheduler.pool.counters.queries, run.scheduler.pool.counters.hits) == (16, 4)


def test_answers_are_cached_too() -> None:
    run = make(blocks=16, tokens=64)
    run.scheduler.add(sequence("a", [1, 2, 3], max_tokens=10, ignore_eos=True))
    run.finish()
    turn = [*run.ended["a"].tokens.tolist(), 5]
    run.scheduler.add(sequence("b", turn, max_tokens=1))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert batch.chunks[0].start == 12
    assert batch.chunks[0].sequence.cached_tokens == 12


def test_the_scheduler_needs_the_standard_library_and_messages_only() -> None:
    code = "import sys, llmc.runtime.scheduler; print(*[m for m in ('numpy', 'torch', 'asyncio') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


# Priorities, long prompts, pace


def test_both_classes_get_their_share_of_a_step() -> None:
    run = make(blocks=400, seqs=8, tokens=64, length=512)
    for i in range(2):
        run.scheduler.add(sequence(f"b{i}", [1] * 400, Handling(priority="batch", cache_salt=f"b{i}")))
        run.scheduler.add(sequence(f"i{i}", [2] * 400, Handling(cache_salt=f"i{i}")))
    given: Counter[str] = Counter()
    for _ in range(8):
        batch = run.scheduler.schedule()
        assert batch is not None
        given.update({c.sequence.priority: 0 for c in batch.chunks})
        for chunk in batch.chunks:
            given[chunk.sequence.priority] += len(chunk.tokens)
        run.scheduler.update(batch, run.engine.run(batch))
    assert given == {"interactive": 384, "batch": 128}
    run.finish()


def test_the_lower_class_gives_way_first_and_then_the_younger() -> None:
    run = make(blocks=13, size=4, tokens=64, length=52)
    names = ("eldest", "batch", "old", "young")
    for name in names:
        priority = "batch" if name == "batch" else "interactive"
        run.scheduler.add(sequence(name, [1] * 8, Handling(priority=priority, cache_salt=name), ignore_eos=True))
    gone: list[str] = []
    while len(gone) < 3:
        assert run.step()
        for waiting in run.scheduler._waiting:
            if waiting.request_id not in gone:
                gone.append(waiting.request_id)
    assert gone == ["batch", "young", "old"]
    run.finish()
    for name in names:
        assert answer(run.ended[name]) == alone([1] * 8, SamplingParams(ignore_eos=True), 52)[0]


def test_an_endless_stream_of_the_higher_class_does_not_starve_the_lower() -> None:
    run = make(blocks=40, size=4, seqs=3, tokens=12, length=64)
    run.scheduler.add(sequence("batch", [1] * 40, Handling(priority="batch"), max_tokens=20, ignore_eos=True))
    for i in range(2000):
        run.scheduler.add(sequence(str(i), [i % 9] * 9, max_tokens=3, ignore_eos=True))
        run.step()
        if "batch" in run.ended:
            break
    assert run.steps < 120
    run.finish()


def test_a_higher_class_may_pass_who_is_next_but_not_for_ever() -> None:
    run = make(blocks=16, size=4, seqs=8, tokens=64, length=48, clock=itertools.count().__next__)
    run.scheduler.add(sequence("runs", [1] * 20, max_tokens=20, ignore_eos=True))
    run.step()
    run.scheduler.add(sequence("next", [2] * 40, Handling(priority="batch"), max_tokens=1))
    run.step()  # 10 blocks do not fit beside 6
    run.scheduler.add(sequence("peer", [3] * 2, Handling(priority="batch"), max_tokens=1))
    for i in range(30):
        run.scheduler.add(sequence(str(i), [i % 9] * 12, max_tokens=1))
        run.step()
    run.finish()
    passed = [s.request_id for s in run.ended.values() if s.admitted < run.ended["next"].admitted]  # type: ignore[operator]
    # Three times its tokens, as the weights are 3 and 1; none of its own class.
    assert passed == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "runs"]


@given(
    st.sampled_from(["interactive", "batch"]),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6), st.sampled_from(["interactive", "batch"])), min_size=1),
    st.integers(1, 5),
    st.integers(2, 24),
    st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_whatever_keeps_coming_everyone_is_served_within_a_bound(
    name: str, size: int, others: list[tuple[int, int, str]], seqs: int, tokens: int, spare: int
) -> None:
    # Once it has a seat it gets at least a sixteenth of the tokens (a quarter in its class's share, a quarter in its
    # lane's) of steps that are at worst half full, and it is set back only by those who were there before it.
    bound = 40 + 4 * 16 * (size + 24 * seqs) // min(tokens, 16)
    run = make(blocks=16 + spare, size=4, seqs=seqs, tokens=tokens, length=64)
    run.scheduler.add(sequence("target", [1] * size, Handling(priority=name), max_tokens=4, ignore_eos=True))
    while "target" not in run.ended:
        assert run.steps <= bound
        for j in range(2):  # more than can be done
            length, answer_, kind = others[(2 * run.steps + j) % len(others)]
            other = f"{run.steps}-{j}"
            prompt = [run.steps % 7] * length
            run.scheduler.add(sequence(other, prompt, Handling(priority=kind), max_tokens=answer_, ignore_eos=True))
        run.step()


def test_few_long_prompts_are_at_work_at_once_and_short_ones_pass() -> None:
    run = make(blocks=400, size=4, seqs=6, tokens=8, length=256, max_long_prefills=1)
    for name in "abc":
        run.scheduler.add(sequence(name, [ord(name) % 9] * 100, max_tokens=1))
    run.scheduler.add(sequence("short", [5] * 4, max_tokens=1))
    run.step()
    assert run.scheduler.num_running == 1  # and the short one has come and gone
    assert "short" in run.ended
    run.finish()
    assert list(run.ended) == ["short", "a", "b", "c"]


def test_the_pace_bounds_a_step_only_while_somebody_decodes() -> None:
    pace = Pace(0.01, 2, 64)
    run = make(blocks=64, size=4, tokens=64, length=128, pace=pace)
    run.scheduler.add(sequence("a", [1] * 100, max_tokens=9, ignore_eos=True))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert batch.num_tokens == 64
    run.scheduler.update(batch, run.engine.run(batch))
    run.step()
    pace.observe(10, 0.0049)  # 18 tokens fit
    run.scheduler.add(sequence("b", [2] * 100, max_tokens=1))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert [len(chunk.tokens) for chunk in batch.chunks] == [1, 17]
    run.scheduler.update(batch, run.engine.run(batch))
    run.finish()


@pytest.mark.parametrize("caching", [True, False])
def test_a_set_back_sequence_goes_on_from_its_copy(caching: bool) -> None:
    run = make(blocks=8, size=4, seqs=2, length=32, caching=caching)
    run.scheduler._parking = parking = Parking(8, 2, 4, needs_state=not caching)
    for i in range(2):
        run.scheduler.add(sequence(str(i), [i] * 8, ignore_eos=True))
    while not run.scheduler.preemptions:
        run.step()
    (waiting,) = run.scheduler._waiting
    assert waiting.parked is not None
    done = waiting.parked.tokens
    assert waiting.remaining == len(waiting.tokens) - done == 1
    while not waiting.blocks:
        assert run.step()
    assert waiting.computed >= done
    run.finish()
    assert (parking.parked, parking.num_used) == (run.scheduler.preemptions, 0)
    for i in range(2):
        assert answer(run.ended[str(i)]) == alone([i] * 8, SamplingParams(ignore_eos=True), 32)[0]


# The queue


def test_the_youngest_of_too_many_are_turned_away_after_admission() -> None:
    run = make(seqs=2, patience=Patience(2, None))
    for i in range(6):
        run.scheduler.add(sequence(str(i), [i] * 4, max_tokens=2, ignore_eos=True))
    run.step()
    turned = run.scheduler.turn_away()
    assert [(s.request_id, s.finish_reason, s.cause) for s in turned] == [
        ("4", "error", "queue_full"),
        ("5", "error", "queue_full"),
    ]
    assert run.scheduler.rejections == {"queue_full": 2}
    run.finish()
    assert set(run.ended) == set("0123")


def test_who_waited_too_long_is_turned_away_but_not_who_was_at_work() -> None:
    now = [0.0]
    run = make(blocks=8, size=4, seqs=2, length=32, patience=Patience(None, 5.0), clock=lambda: now[0])
    for i in range(3):
        run.scheduler.add(sequence(str(i), [i] * 8, ignore_eos=True))
    while not run.scheduler.preemptions:
        run.step()
        assert run.scheduler.turn_away() == []
    now[0] = 5.1
    assert [(s.request_id, s.cause) for s in run.scheduler.turn_away()] == [("2", "queue_timeout")]
    run.finish()
    assert set(run.ended) == {"0", "1"}


# The prefix cache


def test_sequences_of_one_step_share_their_prefix() -> None:
    run = make(blocks=32, tokens=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for name in "abc":
        run.scheduler.add(sequence(name, [*prompt, ord(name) % 9], max_tokens=3, ignore_eos=True))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert [(c.start, len(c.tokens)) for c in batch.chunks] == [(0, 10), (8, 2), (8, 2)]
    run.scheduler.update(batch, run.engine.run(batch))
    run.scheduler.check()
    run.finish()
    for name in "abc":
        expected = alone([*prompt, ord(name) % 9], SamplingParams(max_tokens=3, ignore_eos=True), 64)[0]
        assert answer(run.ended[name]) == expected


def test_prompts_at_work_take_over_what_others_have_computed_since() -> None:
    run = make(blocks=64, size=4, tokens=16, length=128)
    stem = [i % 7 for i in range(64)]
    run.scheduler.add(sequence("a", [*stem, *[1] * 30], max_tokens=1))
    run.scheduler.add(sequence("b", [*stem, *[2] * 30], max_tokens=1))
    computed = 0
    while (batch := run.scheduler.schedule()) is not None:
        computed += batch.num_tokens
        for sequence_ in run.scheduler.update(batch, run.engine.run(batch)):
            run.end(sequence_)
        run.scheduler.check()
    assert computed == 64 + 30 + 30
    assert run.ended["a"].cached_tokens + run.ended["b"].cached_tokens == 64


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Handling(cache_salt="x"), Handling(cache_salt="y")),
        (Handling(cache_salt="x"), Handling()),
        (Handling(tenant="x"), Handling(tenant="y")),
        (Handling(tenant="x", cache_salt="y"), Handling(tenant="y", cache_salt="x")),
        (Handling(skip_reading_prefix_cache=True), Handling()),
        (Handling(), Handling(skip_reading_prefix_cache=True)),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_nothing_is_shared_across_salts_tenants_and_bypasses(one: Handling, two: Handling, together: bool) -> None:
    run = make(blocks=32, tokens=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    run.scheduler.add(sequence("a", prompt, one, max_tokens=2, ignore_eos=True))
    if not together:
        run.finish()
    run.scheduler.add(sequence("b", prompt, two, max_tokens=2, ignore_eos=True))
    run.finish()
    assert run.ended["a"].cached_tokens == run.ended["b"].cached_tokens == 0
    assert run.scheduler.pool.counters.hits == 0
    run.scheduler.add(sequence("c", prompt, two, max_tokens=2, ignore_eos=True))
    run.finish()
    assert run.ended["c"].cached_tokens == (0 if two.skip_reading_prefix_cache else 8)


def test_a_step_that_gave_no_token_takes_back_what_it_promised() -> None:
    run = make(blocks=32, tokens=64)
    for name in "ab":
        run.scheduler.add(sequence(name, [*range(8), ord(name) % 9], max_tokens=9, ignore_eos=True))
    batch = run.scheduler.schedule()
    assert batch is not None
    tokens = run.engine.run(batch)
    gained = run.scheduler.update(batch, [-1, tokens[1]])
    run.scheduler.check()
    assert [s.finish_reason for s in gained] == ["error", None]
    assert run.scheduler.pool.match(array("i", range(9)), 9) == []
    run.finish()
    assert (
        answer(run.ended["b"]) == alone([*range(8), ord("b") % 9], SamplingParams(max_tokens=9, ignore_eos=True), 64)[0]
    )


# Properties


@st.composite
def traffic(
    draw: Callable,
) -> tuple[list[tuple[int, list[int], SamplingParams, Handling]], dict[str, int], list[tuple[int, int]]]:
    """Requests (arrival step, prompt, parameters), the sizes of an engine, and aborts (step, request)."""
    shared = draw(st.lists(st.integers(0, 1), min_size=0, max_size=12))
    length = draw(st.integers(8, 40))
    size = draw(st.sampled_from([1, 2, 4, 8]))
    # Room for one sequence of full length at least; often for little more.
    blocks = -(-length // size) + draw(st.integers(0, 12))
    sizes = {
        "blocks": blocks,
        "size": size,
        "seqs": draw(st.integers(1, 6)),
        "tokens": draw(st.integers(1, 24)),
        "length": length,
        "max_long_prefills": draw(st.integers(1, 3)),
    }
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = shared[: draw(st.integers(0, 12))] + draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
        prompt = prompt[: length - 1]
        room = length - len(prompt)
        params = SamplingParams(
            max_tokens=draw(st.none() | st.integers(1, room)),
            min_tokens=draw(st.integers(0, 3)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        )
        handling = Handling(
            priority=draw(st.sampled_from(["interactive", "batch"])),
            cache_salt=draw(st.sampled_from(["", "", "x"])),
            skip_reading_prefix_cache=draw(st.sampled_from([False, False, False, True])),
        )
        requests.append((draw(st.integers(0, 20)), prompt, params, handling))
    aborts = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=3))
    return requests, sizes, aborts


@given(traffic(), st.booleans(), st.sampled_from([0, 3, 40]))
@settings(max_examples=300, deadline=None)
def test_every_request_ends_once_with_its_own_tokens(case: tuple, caching: bool, host: int) -> None:
    requests, sizes, aborts = case
    parking = Parking(host, host, sizes["size"], needs_state=not caching)
    run = make(**sizes, caching=caching, parking=parking)
    aborted = set()
    for now in range(41):
        for i, (arrival, prompt, params, handling) in enumerate(requests):
            if arrival == now:
                run.scheduler.add(Sequence(str(i), prompt, params, (EOS,), 0, handling))
        for when, which in aborts:
            found = run.scheduler.abort(str(which)) if when == now else None
            if found is not None:
                aborted.add(str(which))
                run.end(found)
        run.step()
    # A step computes a token of the oldest sequence at least, and the oldest is never set back: no one can starve.
    bound = run.steps + sum(len(prompt) + sizes["length"] for _, prompt, _, _ in requests)
    run.finish(bound)
    assert set(run.ended) == {str(i) for i in range(len(requests))}
    for i, (_, prompt, params, _) in enumerate(requests):
        found = run.ended[str(i)]
        if str(i) not in aborted:
            assert (answer(found), found.finish_reason) == alone(prompt, params, sizes["length"])
        else:
            assert found.finish_reason == "abort"
    assert run.scheduler.pool.num_held == parking.num_used == 0
    assert run.scheduler.schedule() is None


def test_a_long_prompt_does_not_starve_among_short_ones() -> None:
    run = make(blocks=24, size=4, seqs=4, tokens=6, length=64)
    run.scheduler.add(sequence("long", [1] * 50, max_tokens=5, ignore_eos=True))
    for i in range(200):
        run.scheduler.add(sequence(f"short{i}", [i % 7, 2], max_tokens=3, ignore_eos=True))
        run.step()
        if "long" in run.ended:
            break
    assert "long" in run.ended
    assert run.steps < 60
    run.finish()
