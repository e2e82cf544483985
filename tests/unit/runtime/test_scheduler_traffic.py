"""Any traffic: every request ends once, with the tokens it would have had alone, and nobody waits for ever."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.core_sequence import Sequence
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.messages import Handling, SamplingParams
from llmc.runtime.records import RecordFile
from tests.unit.runtime.scheduling import (
    EOS,
    VOCAB,
    CarelessFile,
    FullFile,
    Run,
    alone,
    answer,
    make,
    on_disk,
    sequence,
)


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


@st.composite
def returning(
    draw: Callable,
) -> tuple[list[tuple[int, list[int], SamplingParams, Handling]], dict[str, int], list[tuple[int, int]]]:
    """Traffic as above of few prompts that come again and again, and push one another out of a pool for one."""
    size = draw(st.sampled_from([2, 4]))
    sizes = {
        "blocks": 24 // size + draw(st.integers(0, 4)),
        "size": size,
        "seqs": draw(st.integers(1, 4)),
        "tokens": draw(st.sampled_from([5, 24])),
        "length": 24,
    }
    requests = []
    for i in range(draw(st.integers(6, 16))):
        prompt = [draw(st.integers(0, 2))] * draw(st.sampled_from([8, 16, 18])) + [i % 10]
        params = SamplingParams(max_tokens=draw(st.integers(1, 4)), ignore_eos=True)
        salt = draw(st.sampled_from(["", "", "", "x"]))
        requests.append((2 * i + draw(st.integers(0, 3)), prompt, params, Handling(cache_salt=salt)))
    return requests, sizes, draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=2))


@given(traffic(), st.booleans(), st.sampled_from([0, 3, 40]), st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_request_ends_once_with_its_own_tokens(case: tuple, caching: bool, host: int, overlap: bool) -> None:
    options = {"caching": caching, "memory": HostMemory(host, host), "needs_state": not caching, "overlap": overlap}
    play(case, make(**case[1], **options))


@given(
    traffic() | returning(),
    st.sampled_from([1, 3, 12]),
    st.sampled_from([1, 5, 200]),
    st.booleans(),
    st.sampled_from([RecordFile, CarelessFile, FullFile]),
    st.sampled_from([1, 2, 10**9]),
)
@settings(max_examples=300, deadline=None)
def test_a_disk_changes_no_answer(
    case: tuple, host: int, count: int, overlap: bool, kind: type[RecordFile], jobs_a_step: int
) -> None:
    with TemporaryDirectory() as folder:
        run = make(**case[1], memory=HostMemory(host), overlap=overlap, disk=on_disk(Path(folder), count, kind))
        run.jobs_a_step = jobs_a_step
        play(case, run)
        assert run.disk is not None
        run.disk.check(count)
        run.disk.close()


def play(case: tuple, run: Run) -> None:
    """Gives a scheduler the traffic, and checks what came of it."""
    requests, sizes, aborts = case
    aborted = set()
    for now in range(41):
        come = [
            Sequence(str(i), prompt, params, (EOS,), 0, handling)
            for i, (arrival, prompt, params, handling) in enumerate(requests)
            if arrival == now
        ]
        early, late = come[::2], come[1::2]
        for one in early:
            run.scheduler.add(one)
        for when, which in aborts:
            found = run.scheduler.abort(str(which)) if when == now else None
            if found is not None:
                aborted.add(str(which))
                run.end(found)
        run.step(late)
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
    assert run.scheduler.pool.num_held == run.scheduler.parking.num_used == 0
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
