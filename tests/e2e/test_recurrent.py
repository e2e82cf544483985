"""Models that carry a recurrent state, from checkpoint to answers over HTTP: company and cancels change none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import llmc
from llmc.artifacts.plan import Plan
from llmc.cli import main
from llmc.runtime.engine import Engine, SamplingParams
from llmc.runtime.selftest import Probe
from tests.builds import SMALL
from tests.models import save_checkpoint, tiny_model
from tests.unit.runtime.servers import Server, real_server
from tests.unit.runtime.stopwatch import Stopwatch, standing_still

pytestmark = pytest.mark.timeout(600)

#: One with attention beside its recurrences, one without any.
FAMILIES = ("lfm2", "mamba2")
PROMPTS = [[5 + (i * 37 + n * 11) % 290 for i in range(length)] for n, length in enumerate((23, 3, 41, 9, 17, 30))]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recurrent")
    for family in FAMILIES:
        checkpoint = save_checkpoint(folder / family, family)
        llmc.build(checkpoint, folder / f"{family}.plan", precision="fp32", evaluate=False, profile=SMALL)
    return {family: folder / f"{family}.plan" for family in FAMILIES}


@pytest.fixture(scope="module")
def wanted(plans: dict[str, Path]) -> dict[str, list[str]]:
    """What each prompt is answered with alone, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers: dict[str, list[str]] = {}
    for family, plan in plans.items():
        with Engine(plan, max_num_seqs=1) as engine:
            answers[family] = [engine.generate(prompt, params)[0].text for prompt in PROMPTS]
        assert len(set(answers[family])) == len(PROMPTS)
    return answers


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, plans: dict[str, Path]) -> Iterator[tuple[str, Server]]:
    """Steps of 16 tokens, so that prompts come in chunks, and three slots, so that they change hands."""
    sizes = ("--max-num-batched-tokens", "16", "--max-num-seqs", "3")
    with real_server(plans[request.param], "--served-model-name", "tiny", *sizes) as server:
        yield request.param, server


def answers_of(server: Server, prompt: list[int] | list[list[int]], **options: Any) -> list[str]:
    """The text of each choice, of one prompt or of several in turn."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    done = server.http.post("/v1/completions", json={**body, **options})
    assert done.status_code == 200, done.text
    return [choice["text"] for choice in done.json()["choices"]]


def all_at_once(server: Server, prompts: list[list[int]]) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: answers_of(server, prompt)[0], prompts))


def test_company_changes_no_answer(served: tuple[str, Server], wanted: dict[str, list[str]]) -> None:
    family, server = served
    assert all_at_once(server, PROMPTS * 2) == wanted[family] * 2
    assert server.metric("prefix_cache_hits_total") == 0  # although each prompt came twice
    assert 'prefix_cache="off"' in server.http.get("/metrics").text


def test_several_answers_to_one_prompt_are_each_its_own(
    served: tuple[str, Server], wanted: dict[str, list[str]]
) -> None:
    family, server = served
    assert answers_of(server, PROMPTS[2], n=3) == [wanted[family][2]] * 3


def test_a_cancelled_request_leaves_nothing_in_its_slot(
    served: tuple[str, Server], wanted: dict[str, list[str]]
) -> None:
    family, server = served
    for _ in range(4):  # more often than there are slots
        body = {"model": "tiny", "prompt": PROMPTS[4], "max_tokens": 100, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    server.wait_for(lambda: server.metric("num_requests_running") == 0)
    assert [answers_of(server, prompt)[0] for prompt in PROMPTS] == wanted[family]


def test_sequences_that_are_set_back_compute_their_state_anew(
    plans: dict[str, Path], wanted: dict[str, list[str]]
) -> None:
    """Blocks for little more than one sequence of full length. The core stands still until all prompts are sent: so
    none ends before another begins, and what is admitted grows out of the pool, however fast or busy the machine is.
    """
    manifest = Plan.open(plans["lfm2"]).manifest
    blocks = -(-manifest.profile.max_seq_len // manifest.profile.block_size) + 2
    prompts, params = PROMPTS * 4, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with (
        Engine(plans["lfm2"], num_blocks=blocks, max_num_seqs=len(prompts)) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        front, core = engine._service.front, engine._service.process
        assert core is not None
        with standing_still(core.process.pid):
            answers = pool.submit(engine.generate, prompts, params)
            assert Stopwatch().wait(lambda: len(front._live) == len(prompts), 30)
        assert [answer.text for answer in answers.result()] == wanted["lfm2"] * 4
        assert Stopwatch().wait(lambda: front.stats is not None and front.stats.preemptions > 0, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_matches_hugging_face(family: str, plans: dict[str, Path]) -> None:
    ids = PROMPTS[2]
    with Probe(plans[family]) as probe:
        have = probe.logits(ids, chunk=7).astype(np.float64)
        whole = probe.logits(ids)
    with torch.inference_mode():
        want = tiny_model(family)(torch.tensor([ids]), use_cache=False).logits[0].numpy().astype(np.float64)
    cosine = (want * have).sum(-1) / (np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1))
    assert cosine.min() >= 0.99999
    assert np.array_equal(have, whole), "chunks change bits"


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_counts_the_state(family: str, plans: dict[str, Path]) -> None:
    plan = plans[family]
    manifest = Plan.open(plan).manifest
    (rank,) = manifest.ranks
    assert rank.state_slot_bytes == manifest.state_slot_bytes > 0
    assert sum(layer.nbytes for layer in rank.state_layers) <= rank.state_slot_bytes
    assert bool(rank.kv_layers) == bool(rank.kv_block_bytes) == (family == "lfm2")
    text = CliRunner().invoke(main, ["inspect", str(plan)], terminal_width=200).output
    kinds = "1 causal_conv" if family == "lfm2" else "2 causal_conv, 2 ssd_scan"
    assert f"{rank.state_slot_bytes:,} B a sequence ({kinds})" in text
    assert "off: blocks do not hold the states" in text
    report = json.loads(bytes(Plan.open(plan).section("report.json")))["memory"]
    assert report["state_bytes"] == manifest.profile.max_num_seqs * rank.state_slot_bytes
