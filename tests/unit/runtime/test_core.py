"""The core as a process, over a plan whose compiled model is a hash of the tokens in KV memory."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.messages import Handling
from tests.unit.runtime.disks import MAIN, QUICK_DISK, SLOW_DISK
from tests.unit.runtime.fake_engine import CORE, NAN_TOKEN, Client, greedy, write_engine_plan


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of mixed lengths, some of which begin alike."""
    draw = random.Random(seed)
    stem = [draw.randrange(40) for _ in range(30)]
    return [
        stem[: draw.choice((0, 0, 7, 16, 30))] + [draw.randrange(40) for _ in range(draw.randint(1, 24))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"num_blocks": 24},  # no more than one sequence of full length
        {"num_blocks": 24, "kv_host_bytes": 4000},
        {"num_blocks": 24, "kv_host_bytes": 4000, "prefix_cache": False},
        {"num_blocks": 40, "max_num_batched_tokens": 5, "max_num_seqs": 4},
        {"max_num_batched_tokens": 1},
        {"mmap": False},
    ],
)
@pytest.mark.parametrize(("ranks", "overlap"), [(1, True), (2, True), (1, False)])
def test_every_answer_is_what_the_model_gives_alone(
    plan: Path, plan_tp2: Path, options: dict, ranks: int, overlap: bool
) -> None:
    with Client(plan if ranks == 1 else plan_tp2, **options, overlap=overlap) as client:
        cases = prompts(24)
        with client.held():  # all are there before one ends
            for i, prompt in enumerate(cases):
                client.submit(str(i), prompt, max_tokens=30, ignore_eos=True)
        client.wait_all()
        for i, prompt in enumerate(cases):
            assert client.ended[str(i)].finish_reason == "length"
            assert client.tokens[str(i)] == greedy(prompt, 30)
        client.wait(client.idle)
        last = client.stats[-1]
        assert (last.waiting, last.blocks_used) == (0, 0)
        assert last.generation_tokens == 24 * 30
        assert (last.prefix_hits > 0) == options.get("prefix_cache", True)
        if options.get("num_blocks") == 24:
            assert last.preemptions > 0
        if "kv_host_bytes" in options:
            assert (last.host_blocks_used, last.host_blocks_total) == (0, 4000 // (32 * ranks))


def test_where_computing_is_slow_preempted_sequences_are_copied(slow: Path) -> None:
    options = {"num_blocks": 24, "kv_host_bytes": 4000, "max_num_batched_tokens": 16}
    with Client(slow, program=("-c", QUICK_DISK + MAIN), **options) as client:
        with client.held():
            for i in range(4):
                client.submit(str(i), [i] * 18, max_tokens=30, ignore_eos=True)
        client.wait_all()
        for i in range(4):
            assert client.tokens[str(i)] == greedy([i] * 18, 30)
        client.wait(client.idle)
        assert client.stats[-1].preemptions == client.stats[-1].preemptions_copied > 0


def test_evicted_prefixes_come_back_from_host_memory(slow: Path) -> None:
    stem = [7] * 40
    others = [[i] * 60 for i in range(4)]
    options = {"num_blocks": 24, "kv_host_bytes": 100 * 64, "max_num_batched_tokens": 16}
    with Client(slow, program=("-c", QUICK_DISK + MAIN), **options) as client:
        for i, prompt in enumerate([stem, *others, [*stem, 3], [*stem, 4]]):
            client.submit(str(i), prompt, max_tokens=6, ignore_eos=True)
            client.wait_all()
            assert client.tokens[str(i)] == greedy(prompt, 6)
        client.submit("salted", [*stem, 3], Handling(cache_salt="x"), max_tokens=6, ignore_eos=True)
        client.wait_all()
        assert client.tokens["salted"] == greedy([*stem, 3], 6)
        cached = [client.ended[name].cached_tokens for name in ("0", "5", "6", "salted")]
        assert cached == [0, 40, 40, 0]
        client.wait(lambda: client.idle() and client.stats[-1].prompt_tokens == 40 + 4 * 60 + 3 * 41)
        last = client.stats[-1]
        assert last.evictions > 0
        assert (last.shelf_hits, last.blocks_used, last.host_blocks_used) == ({"host": 40}, 0, 0)


@pytest.mark.parametrize("host", [{}, {"kv_host_bytes": 24 * 64}])
def test_evicted_prefixes_come_back_from_a_disk(slow: Path, tmp_path: Path, host: dict) -> None:
    stem = [7] * 40
    others = [[i] * 60 for i in range(6)]
    options = {"num_blocks": 24, "max_num_batched_tokens": 16, "program": ("-c", QUICK_DISK + MAIN), **host}
    with Client(slow, kv_disk=str(tmp_path), kv_disk_bytes=2**20, **options) as client:
        for i, prompt in enumerate([stem, *others, [*stem, 3], [*stem, 4]]):
            client.submit(str(i), prompt, max_tokens=6, ignore_eos=True)
            client.wait_all()
            assert client.tokens[str(i)] == greedy(prompt, 6)
        assert [client.ended[name].cached_tokens for name in ("0", "7", "8")] == [0, 40, 40]
        client.wait(lambda: client.idle() and client.stats[-1].prompt_tokens == 40 + 6 * 60 + 2 * 41)
        last = client.stats[-1]
        assert last.shelf_hits["disk"] > 0
        assert last.shelf_damaged == {"disk": 0}
        client.process.kill()
        client.exit_code()
    assert not [*tmp_path.iterdir()]


#: A core whose executor chooses tokens as a GPU does, and leaves no logits of their rows.
_CHOOSING = """
import sys
from types import SimpleNamespace
import numpy as np
from llmc.plugins.sampler import reference
from llmc.runtime import core_main
from llmc.runtime.executor import Executor
compute = Executor.finish
chosen = 0

def choose(self):
    global chosen
    logits = compute(self)
    for number, row in enumerate(self._memory.sampler_params[: len(logits)]):
        on_gpu, _, _, top_k, least, low, high, counter = row.tolist()
        if on_gpu:
            temperature, top_p = row[1:3].view(np.float32).tolist()
            about = SimpleNamespace(
                temperature=temperature, top_p=top_p, min_p=least / 2**30, top_k=top_k, counter=counter,
                seed=(high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF, num_logprobs=-1, repetition_penalty=1.0,
                presence_penalty=0.0, frequency_penalty=0.0, prompt=(), output=(), bias_ids=(), bias=(), banned=(),
            )
            self.tokens[number] = reference.sample(logits[number], about).token
            logits[number] = np.nan
            chosen += 1
    return logits

Executor.samples, Executor.finish = property(lambda self: True, lambda self, value: None), choose
code = core_main.main(sys.argv)
print(chosen, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_the_same_whoever_chooses_them(plan: Path, overlap: bool) -> None:
    """Beside rows that a GPU chooses stand those that it must leave to the host, for ever or at first."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0}, {"temperature": 1.0, "seed": 2**63 + 7}, {"temperature": 2.5, "top_p": 0.8, "seed": 1},
        {"temperature": 40.0, "top_k": 5, "min_p": 0.5, "seed": 3}, {"temperature": 1.5, "min_tokens": 9, "seed": 4},
        {"logprobs": 2}, {"temperature": 2.0, "repetition_penalty": 1.4, "seed": 5}, {"logit_bias": {7: 9.0}},
    ]  # fmt: skip
    answers = []
    for program in (CORE, ("-c", _CHOOSING)):
        with Client(plan, program=program, overlap=overlap, max_num_batched_tokens=16) as client:
            for i, prompt in enumerate(prompts(24)):
                client.submit(str(i), prompt, max_tokens=20, **kinds[i % len(kinds)])
            client.submit("nan", [1, 2, NAN_TOKEN], max_tokens=5)
            client.wait_all()
            answers.append((client.tokens, {name: output.finish_reason for name, output in client.ended.items()}))
            client.shut_down()
            assert client.exit_code() == 0
            assert client.process.stderr is not None
            errors = client.process.stderr.read()
    assert answers[0] == answers[1]
    assert int(errors.split()[-1]) > 24 * 5


@pytest.mark.parametrize("end", ["abort", "shutdown", "drain"])
def test_only_who_needs_it_waits_for_a_slow_disk(slow: Path, tmp_path: Path, end: str) -> None:
    gate, stem = tmp_path / "gate", [7] * 40
    options = {"num_blocks": 24, "max_num_batched_tokens": 16, "kv_disk": str(tmp_path), "kv_disk_bytes": 2**20}
    options |= {"kv_host_bytes": 24 * 64, "program": ("-c", QUICK_DISK + SLOW_DISK.format(gate=str(gate)) + MAIN)}
    with Client(slow, **options) as client:
        for i, prompt in enumerate([stem, *([i] * 60 for i in range(4))]):
            client.submit(str(i), prompt, max_tokens=6, ignore_eos=True)
            client.wait_all()
        client.submit("waits", [*stem, 3], max_tokens=6, ignore_eos=True)
        client.submit("other", [9] * 8, max_tokens=20, ignore_eos=True)
        client.wait(lambda: "other" in client.ended)
        assert client.tokens["other"] == greedy([9] * 8, 20)
        assert "waits" not in client.ended
        client.wait(lambda: (client.stats[-1].running, client.stats[-1].waiting) == (0, 1))
        if end == "abort":
            client.abort("waits")
            client.wait(client.idle)
            assert client.ended["waits"].finish_reason == "abort"
            assert client.stats[-1].blocks_used == 0
        elif end == "shutdown":
            client.shut_down(drain=False)
            client.wait_all()
            assert client.ended["waits"].finish_reason == "error"
            assert client.exit_code() == 0
        else:
            client.shut_down()
            gate.touch()
            client.wait_all()
            assert client.tokens["waits"] == greedy([*stem, 3], 6)
            assert client.ended["waits"].cached_tokens == 40
            assert client.exit_code() == 0


def test_time_tells_nothing_of_what_is_cached_under_another_salt(slow: Path) -> None:
    """A prompt takes as many steps as if nobody had ever asked it, unless it was asked under the same salt."""
    with Client(slow, max_num_batched_tokens=8) as client:
        steps = []
        for i, salt in enumerate(("a", "a", "b", "", "b")):
            before = client.stats[-1].steps if client.stats else 0
            client.submit(str(i), [7] * 41, Handling(cache_salt=salt), max_tokens=1)
            client.wait(lambda i=i: str(i) in client.ended)
            client.wait(lambda before=before: client.idle() and client.stats[-1].steps > before)
            steps.append(client.stats[-1].steps - before)
        assert steps == [6, 1, 6, 6, 1]


def test_too_many_are_turned_away_with_a_time_to_come_again(slow: Path) -> None:
    with Client(slow, max_num_seqs=2, max_num_queued_reqs=1) as client:
        with client.held():
            for i in range(2):
                client.submit(f"runs{i}", [i], max_tokens=20, ignore_eos=True)
            for i in range(3):
                client.submit(f"more{i}", [i], max_tokens=1, ignore_eos=True)
        client.wait_all()
        turned = [name for name, output in client.ended.items() if output.cause == "queue_full"]
        assert turned == ["more1", "more2"]
        last = client.ended["more2"]
        assert (last.finish_reason, 1 <= last.retry_after <= 60) == ("error", True)
        assert "queue is full" in (last.error or "")
        assert client.outputs["more0"][-1].queue_seconds > 0
        client.wait(client.idle)
        assert client.stats[-1].rejections == {"queue_full": 2}


def test_who_waits_too_long_is_turned_away(slow: Path) -> None:
    with Client(slow, max_num_seqs=1, queue_timeout=0.1) as client:
        with client.held():
            client.submit("runs", [1], max_tokens=30, ignore_eos=True)
            client.submit("waits", [2], max_tokens=1, ignore_eos=True)
        client.wait_all()
        assert client.ended["waits"].cause == "queue_timeout"
        assert "0.1 s (--queue-timeout)" in (client.ended["waits"].error or "")
        assert client.tokens["runs"] == greedy([1], 30)


def test_answers_do_not_depend_on_their_handling(plan_tp2: Path) -> None:
    kinds = [
        Handling(),
        Handling(priority="batch"),
        Handling(cache_salt="x"),
        Handling(tenant="y"),
        Handling(skip_reading_prefix_cache=True),
    ]
    with Client(plan_tp2, num_blocks=30, itl_budget_ms=5.0) as client:
        cases = prompts(20)
        for i, prompt in enumerate(cases):
            client.submit(str(i), prompt, kinds[i % 5], max_tokens=20, ignore_eos=True)
        client.wait_all()
        for i, prompt in enumerate(cases):
            assert client.tokens[str(i)] == greedy(prompt, 20)
        client.submit("no such class", [1], Handling(priority="urgent"))
        client.wait_all()
        assert "priority is 'urgent'; there is interactive, batch" in (client.ended["no such class"].error or "")


def test_parameters_reach_the_sampler_and_results_come_back(plan: Path) -> None:
    prompt = [5, 6, 7]
    free = greedy(prompt, 20)
    with Client(plan) as client:
        client.submit("stop", prompt, stop_token_ids=(free[4],), max_tokens=20, ignore_eos=True)
        client.submit("bias", prompt, logit_bias={free[0]: -100.0}, max_tokens=1)
        client.submit("logprobs", prompt, logprobs=3, max_tokens=2, ignore_eos=True)
        client.submit("penalty", [*prompt, free[0]], repetition_penalty=1000.0, max_tokens=1)
        client.submit("minimum", prompt, stop_token_ids=tuple(free[:1]), min_tokens=1, max_tokens=2, ignore_eos=True)
        client.wait_all()
    at = free.index(free[4])
    assert client.tokens["stop"] == free[:at]
    assert (client.ended["stop"].finish_reason, client.ended["stop"].stop_token) == ("stop", free[4])
    assert client.tokens["bias"] != free[:1]
    assert len(client.tokens["minimum"]) >= 1
    assert client.tokens["minimum"][0] != free[0]
    assert client.tokens["penalty"][0] not in (*prompt, free[0])
    found = [output.logprobs for output in client.outputs["logprobs"]]
    for token, entries in zip(free[:2], found, strict=True):
        assert entries is not None
        (entry,) = entries
        assert (entry.rank, entry.top[0].token, entry.logprob) == (1, token, entry.top[0].logprob)
        assert len(entry.top) == 3
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob


def test_seeded_answers_depend_on_nothing_else(plan: Path) -> None:
    ask = {"temperature": 1.0, "seed": 11, "max_tokens": 20, "ignore_eos": True, "logit_bias": {NAN_TOKEN: -100.0}}
    with Client(plan) as client:
        client.submit("alone", [1, 2, 3], **ask)
        client.wait_all()
        alone = client.tokens["alone"]
    with Client(plan, num_blocks=24, max_num_batched_tokens=9) as client:
        for i, prompt in enumerate(prompts(10)):
            client.submit(f"other{i}", prompt, max_tokens=20, temperature=1.0, logit_bias={NAN_TOKEN: -100.0})
        client.submit("among", [1, 2, 3], **ask)
        client.submit("other seed", [1, 2, 3], **{**ask, "seed": 12})
        client.submit("no seed", [1, 2, 3], **{**ask, "seed": None})
        client.submit("no seed again", [1, 2, 3], **{**ask, "seed": None})
        client.wait_all()
        assert client.tokens["among"] == alone
        assert client.tokens["other seed"] != alone
        assert client.tokens["no seed"] != client.tokens["no seed again"]


@pytest.mark.parametrize("overlap", [True, False])
def test_nan_ends_that_request_only(plan_tp2: Path, overlap: bool) -> None:
    with Client(plan_tp2, overlap=overlap) as client:
        client.submit("broken", [1, NAN_TOKEN, 2], max_tokens=5)
        client.submit("sound", [1, 2], max_tokens=5, ignore_eos=True)
        client.wait_all()
        assert client.ended["broken"].finish_reason == "error"
        assert "not finite" in (client.ended["broken"].error or "")
        assert client.tokens["sound"] == greedy([1, 2], 5)
        client.submit("after", [3], max_tokens=5, ignore_eos=True)
        client.wait_all()
        assert client.tokens["after"] == greedy([3], 5)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([1] * 96, {}, "96 tokens.*max_seq_len is 96"),
        ([1] * 90, {"max_tokens": 10}, "together 100.*max_seq_len of 96"),
        ([1] * 20, {"max_tokens": 30}, "KV pool holds 48"),
        ([50], {}, "token id 50"),
        ([1], {"temperature": -1.0}, "temperature is -1"),
        ([1], {"logprobs": 1000}, "logprobs is 1000"),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused(small: Client, prompt: list, params: dict, message: str) -> None:
    name = f"bad {message}"
    small.submit(name, prompt, **params)
    small.wait_all()
    assert small.ended[name].finish_reason == "error"
    assert re.search(message, small.ended[name].error or "")


@pytest.fixture(scope="module")
def small(plan: Path) -> Iterator[Client]:
    with Client(plan, num_blocks=12) as client:
        yield client


def test_aborts_free_the_blocks_in_every_state(endless: Path) -> None:
    with Client(endless, num_blocks=4000, max_num_seqs=2, max_num_batched_tokens=4) as client:
        client.submit("decoding", [1], ignore_eos=True)
        client.wait(lambda: client.tokens["decoding"])
        client.submit("prefilling", [2] * 6000, ignore_eos=True)
        client.submit("waiting", [3], ignore_eos=True)
        client.wait(lambda: client.stats and (client.stats[-1].running, client.stats[-1].waiting) == (2, 1))
        for name in ("waiting", "prefilling", "decoding", "unknown"):
            client.abort(name)
        client.wait_all()
        assert {output.finish_reason for output in client.ended.values()} == {"abort"}
        assert not client.tokens["prefilling"]
        client.wait(client.idle)
        assert (client.stats[-1].waiting, client.stats[-1].blocks_used) == (0, 0)


def test_shutdown_drains(tmp_path: Path) -> None:
    gate, wanted = tmp_path / "gate", greedy([1, 2], 10)
    assert wanted[3] not in (1, 2, *wanted[:3])
    plan = write_engine_plan(tmp_path / "gated.plan", tp=2, hang_token=wanted[3])
    with Client(plan, gate=gate) as client:
        client.submit("a", [1, 2], max_tokens=10, ignore_eos=True)
        client.wait(lambda: client.tokens["a"])
        client.shut_down()
        client.submit("late", [1], max_tokens=1)
        gate.touch()
        client.wait_all()
        assert client.tokens["a"] == wanted
        assert "shutting down" in (client.ended["late"].error or "")
        assert client.exit_code() == 0


def test_shutdown_at_once_ends_what_runs(endless: Path) -> None:
    with Client(endless) as client:
        client.submit("a", [1, 2], ignore_eos=True)
        client.wait(lambda: client.tokens["a"])
        client.shut_down(drain=False)
        client.wait_all()
        assert client.ended["a"].finish_reason == "error"
        assert client.exit_code() == 0
