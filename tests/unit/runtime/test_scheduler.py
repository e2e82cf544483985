"""What a step computes, for whom, and who ends: within the budgets, once."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from array import array

import pytest

from llmc.artifacts.errors import UsageError
from llmc.runtime.admission import Patience
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.messages import Handling, SamplingParams
from llmc.runtime.pacing import Pace
from tests.unit.runtime.scheduling import alone, answer, check, make, sequence


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


@pytest.mark.parametrize(("blocks", "admitted"), [(10, True), (11, False)])
def test_admission_leaves_a_watermark_of_free_blocks(blocks: int, admitted: bool) -> None:
    run = make(blocks=16, size=4, tokens=64, length=64)
    run.scheduler.add(sequence("runs", [1] * 14, max_tokens=2, ignore_eos=True))  # 4 blocks to its end
    run.step()
    run.scheduler.add(sequence("comes", [2] * 4 * blocks, max_tokens=1))
    run.step()
    assert ("comes" in run.ended) == admitted
    run.finish()
    assert "comes" in run.ended


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
    check(run.scheduler)
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
    run = make(blocks=8, size=4, seqs=2, length=32, caching=caching, memory=HostMemory(8, 2), needs_state=not caching)
    parking = run.scheduler.parking
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
    check(run.scheduler)
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
        check(run.scheduler)
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
    check(run.scheduler)
    assert [s.finish_reason for s in gained] == ["error", None]
    assert run.scheduler.pool.match(array("i", range(9)), 9) == []
    run.finish()
    assert (
        answer(run.ended["b"]) == alone([*range(8), ord("b") % 9], SamplingParams(max_tokens=9, ignore_eos=True), 64)[0]
    )


# Properties


def test_answers_of_one_prompt_share_its_full_blocks_and_write_their_own() -> None:
    """n > 1: FakeEngine fails where two of them write to one place, or one reads what another wrote."""
    run = make(blocks=32, size=4, tokens=64, length=32)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    branches = [sequence(name, prompt, max_tokens=12, ignore_eos=True) for name in "abc"]
    for branch in branches:
        run.scheduler.add(branch)
    batch = run.scheduler.schedule()
    assert batch is not None
    run.engine.run(batch)
    run.update(batch, [1, 2, 3])  # the sampler has drawn another token for each
    run.step()
    tables = [branch.blocks[:] for branch in branches]
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({table[2] for table in tables}) == 3
    assert run.scheduler.pool.num_held == 2 + 3
    run.finish()
    for first, branch in zip((1, 2, 3), branches, strict=True):
        assert answer(branch) == [
            first,
            *alone([*prompt, first], SamplingParams(max_tokens=11, ignore_eos=True), 32)[0],
        ]


def test_a_shared_prefix_of_4096_tokens_is_a_ninth_of_the_steps() -> None:
    run = make(blocks=600, size=16, tokens=512, length=5000)
    prefix = [i % 10 for i in range(4096)]
    taken = []
    for name in "ab":
        before = run.steps
        run.scheduler.add(sequence(name, prefix + [ord(name) % 10] * 100, max_tokens=1))
        run.finish()
        taken.append(run.steps - before)
    assert taken == [9, 1]


def test_composing_a_step_of_64_sequences_takes_little() -> None:
    """5 % of a step of the smallest model measured, whose step of 64 sequences lasts 217 ms, are 11 ms."""
    run = make(blocks=64 * 20, size=16, seqs=64, tokens=512, length=300)
    for i in range(64):
        run.scheduler.add(sequence(str(i), [i % 10, i // 10] * 4, max_tokens=200, ignore_eos=True))
    batch, times = run.scheduler.schedule(), []
    for _ in range(100):
        assert batch is not None
        began = time.thread_time()
        following = run.scheduler.schedule()
        run.scheduler.update(batch, [1] * 64, following)
        times.append(time.thread_time() - began)
        batch = following
        assert batch is None or len(batch.chunks) == 64
    assert statistics.median(times) < 0.011
