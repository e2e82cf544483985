"""Scheduling: every request ends once, within the budgets, with the tokens it would have had alone."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UsageError
from llmc.runtime.blocks import BlockPool
from llmc.runtime.messages import SamplingParams
from llmc.runtime.scheduler import Scheduled, Scheduler, Sequence
from llmc.runtime.step import StepBatch

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

    def advance(self, chunk: Scheduled) -> list[int]:
        """The other memory: a state that starts anew at position 0 and otherwise goes on from what its slot holds."""
        known = self.states[chunk.state_slot] if chunk.start else []
        assert len(known) == chunk.start, f"the state in slot {chunk.state_slot} is not that of position {chunk.start}"
        self.states[chunk.state_slot] = [*known, *chunk.tokens]
        return self.states[chunk.state_slot]

    def run(self, batch: StepBatch[Scheduled]) -> list[int]:
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
    *, blocks: int = 16, size: int = 4, seqs: int = 4, tokens: int = 16, length: int = 64, caching: bool = True
) -> Run:
    pool = BlockPool(blocks, size, caching)
    scheduler = Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_seq_len=length)
    return Run(scheduler, FakeEngine(size), tokens, seqs)


def sequence(name: str, prompt: list[int], **params: object) -> Sequence:
    return Sequence(name, prompt, SamplingParams(**params), (EOS,))  # type: ignore[arg-type]


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


def test_admission_waits_for_blocks_of_the_whole_prompt_and_keeps_the_order() -> None:
    run = make(blocks=8, size=4, tokens=64, length=32)
    run.scheduler.add(sequence("a", [1] * 20, max_tokens=4, ignore_eos=True))
    run.scheduler.add(sequence("b", [2] * 12, max_tokens=4, ignore_eos=True))  # 3 blocks and the reserve do not fit
    run.scheduler.add(sequence("c", [3], max_tokens=1, ignore_eos=True))  # would fit, but is younger
    run.step()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (1, 2)
    run.finish()
    assert list(run.ended) in (["a", "b", "c"], ["a", "c", "b"])


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
    assert (run.scheduler.prefix_queries, run.scheduler.prefix_hits) == (16, 4)


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


# Properties


@st.composite
def traffic(
    draw: Callable,
) -> tuple[list[tuple[int, list[int], SamplingParams]], dict[str, int], list[tuple[int, int]]]:
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
        requests.append((draw(st.integers(0, 20)), prompt, params))
    aborts = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=3))
    return requests, sizes, aborts


@given(traffic(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_request_ends_once_with_its_own_tokens(case: tuple, caching: bool) -> None:
    requests, sizes, aborts = case
    run = make(**sizes, caching=caching)
    aborted = set()
    for now in range(41):
        for i, (arrival, prompt, params) in enumerate(requests):
            if arrival == now:
                run.scheduler.add(Sequence(str(i), prompt, params, (EOS,)))
        for when, which in aborts:
            found = run.scheduler.abort(str(which)) if when == now else None
            if found is not None:
                aborted.add(str(which))
                run.end(found)
        run.step()
    # A step computes a token of the oldest sequence at least, and the oldest is never set back: no one can starve.
    bound = run.steps + sum(len(prompt) + sizes["length"] for _, prompt, _ in requests)
    run.finish(bound)
    assert set(run.ended) == {str(i) for i in range(len(requests))}
    for i, (_, prompt, params) in enumerate(requests):
        found = run.ended[str(i)]
        if str(i) not in aborted:
            assert (answer(found), found.finish_reason) == alone(prompt, params, sizes["length"])
        else:
            assert found.finish_reason == "abort"
    assert run.scheduler.pool.num_held == 0
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
