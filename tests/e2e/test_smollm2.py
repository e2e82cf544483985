"""The real model through the whole path, beside Hugging Face at fp32: the figures that the project promises."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.reference import load_reference
from llmc.calibration.quality import evaluation_windows
from llmc.runtime.engine import Engine
from llmc.runtime.messages import SamplingParams
from llmc.runtime.selftest import Probe
from tests.unit.runtime.fake_engine import children

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three laws of thermodynamics say that",
    "List the planets of the solar system:",
    "In 1969, the first human",
    "A short poem about autumn:\n",
)
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def build(real_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds SmolLM2 once for each set of options."""
    folder, made = tmp_path_factory.mktemp("plans"), {}

    def make(**options: object) -> Path:
        key = "-".join(f"{k}{v}" for k, v in sorted(options.items()))
        if key not in made:
            made[key] = folder / f"{key}.plan"
            llmc.build(real_gguf, made[key], evaluate=False, **options)
        return made[key]

    return make


@pytest.fixture(scope="module")
def checkpoint(real_gguf: Path):
    return open_checkpoint(real_gguf)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def windows(checkpoint) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bytes(checkpoint.tokenizer_json).decode())
    return evaluation_windows(lambda text: tokenizer.encode(text).ids, windows=2, length=128)


def generate(
    plan: Path, prompts: tuple[str, ...] = PROMPTS, params: SamplingParams = GREEDY, **options: object
) -> list:
    with Engine(plan, **options) as engine:
        return [completion.token_ids for completion in engine.generate(list(prompts), params)]


@pytest.fixture(scope="module")
def fp32_tokens(build: Build) -> list[list[int]]:
    return generate(build(precision="fp32", tp=1))


def cosines(reference, plan: Path, windows: list[list[int]]) -> np.ndarray:
    import torch

    out = []
    with Probe(plan) as probe, torch.no_grad():
        for ids in windows:
            want = reference(torch.tensor([ids])).logits[0].numpy().astype(np.float64)
            have = probe.logits(ids).astype(np.float64)
            out.append((want * have).sum(-1) / (np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1)))
    return np.concatenate(out)


def test_fp32_logits_match_hugging_face(build: Build, reference, windows) -> None:
    assert cosines(reference, build(precision="fp32", tp=1), windows).min() >= 0.99999


def test_bf16_logits_match_hugging_face(build: Build, reference, windows) -> None:
    assert cosines(reference, build(precision="bf16", tp=1), windows).min() >= 0.999


def test_fp32_greedy_tokens_are_hugging_faces(fp32_tokens: list[list[int]], reference, checkpoint) -> None:
    # One forward over prompt and answer: greedy decoding took these tokens exactly if each is the argmax before it.
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bytes(checkpoint.tokenizer_json).decode())
    for prompt, tokens in zip(PROMPTS, fp32_tokens, strict=True):
        assert len(tokens) == NEW_TOKENS
        ids = tokenizer.encode(prompt).ids
        with torch.no_grad():
            logits = reference(torch.tensor([ids + tokens])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == tokens, prompt


def test_tensor_parallel_gives_the_same_text(build: Build, fp32_tokens: list[list[int]]) -> None:
    """Of 9 heads and 3 KV heads three ranks have as many each; the plan that all tests share has two ranks."""
    assert generate(build(precision="fp32", tp=3)) == fp32_tokens


def test_a_request_gives_the_same_tokens_alone_among_others_and_chunked(smollm2_plan: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
    long = "Tell me everything about the following list of words: " + "apple pear plum " * 60
    prompts = (*PROMPTS, long)
    together = generate(smollm2_plan, prompts, params)
    alone = [generate(smollm2_plan, (prompt,), params)[0] for prompt in (prompts[0], long)]
    chunked = generate(smollm2_plan, prompts, params, max_num_batched_tokens=32, max_num_seqs=3)
    assert alone == [together[0], together[-1]]
    assert chunked == together


def test_logits_are_bit_for_bit_the_same_in_any_chunks(smollm2_plan: Path, windows) -> None:
    with Probe(smollm2_plan) as probe:
        whole = probe.logits(windows[0])
        for chunk in (1, 7, 64):
            assert np.array_equal(probe.logits(windows[0], chunk=chunk), whole), chunk


def test_greedy_answers_are_the_same_together_and_in_groups(smollm2_plan: Path, windows) -> None:
    prompts = [windows[0][: 3 + 7 * n] for n in range(6)]
    with Probe(smollm2_plan) as probe:
        alone = [probe.greedy([prompt], 6)[0] for prompt in prompts]
        assert probe.greedy(prompts, 6) == alone
        probe._blocks = probe._blocks[:5]  # so few that they go in groups, and the largest takes them all
        assert probe.greedy(prompts, 6) == alone


@pytest.fixture
def engine(smollm2_plan: Path) -> Iterator[Engine]:
    with Engine(smollm2_plan) as opened:
        yield opened


def test_the_golden_answers_hold(smollm2_plan: Path) -> None:
    from llmc.runtime.selftest import check_golden

    findings = check_golden(smollm2_plan)
    assert findings
    assert all(f.ok for f in findings), findings


def test_the_demo_answers_paris(engine: Engine) -> None:
    (answer,) = engine.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0, max_tokens=40)
    )
    assert "Paris" in answer.text


def test_a_killed_rank_fails_what_is_running(engine: Engine) -> None:
    import os
    import threading

    core = engine._service.process
    assert core is not None
    ranks = children(core.process.pid)
    assert len(ranks) == 2
    threading.Timer(0.5, os.kill, (ranks[-1], signal.SIGKILL)).start()
    with pytest.raises(llmc.LlmcError, match="rank"):
        engine.generate(["Count to one thousand:"] * 4, SamplingParams(max_tokens=1500, ignore_eos=True))


def test_fp8_costs_at_most_one_percent_of_perplexity(smollm2_plan: Path) -> None:
    quality = json.loads(bytes(Plan.open(smollm2_plan).section("quality.json")))
    assert (quality["run"], quality["text"], quality["tokens"]) == ("done", "pydoc_data.topics", 6 * 511)
    assert 0.99 < quality["perplexity"] / quality["reference_perplexity"] <= 1.01
    assert quality["kl"] < 0.006
