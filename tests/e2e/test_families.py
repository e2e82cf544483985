"""Tiny models of every family from checkpoint folder to engine, beside Hugging Face; no family has code of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc.runtime.selftest import Probe
from tests.builds import SMALL
from tests.models import FAMILIES, save_checkpoint, tiny_model

PROMPT = [5 + i * 37 % 290 for i in range(40)]  # longer than the sliding window of the tiny models
DECODED = 16

pytestmark = pytest.mark.timeout(600)


def reference(family: str, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return tiny_model(family)(torch.tensor([ids])).logits[0].numpy().astype(np.float64)


def built(tmp_path: Path, family: str, **options: object) -> Path:
    checkpoint = save_checkpoint(tmp_path / family, family)
    plan = tmp_path / f"{family}.plan"
    llmc.build(checkpoint, plan, evaluate=False, **{"profile": SMALL, **options})
    return plan


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_matches_hugging_face(family: str, tmp_path: Path) -> None:
    profile = "chat" if family == "llama" else SMALL  # decodes are other code there
    with Probe(built(tmp_path, family, precision="fp32", profile=profile)) as probe:
        (tokens,) = probe.greedy([PROMPT], DECODED)
        ids = PROMPT + tokens
        have = probe.logits(ids).astype(np.float64)
    want = reference(family, ids)
    cosine = (want * have).sum(-1) / (np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1))
    assert cosine.min() >= 0.99999
    assert want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
def test_two_uneven_ranks_compute_the_same(family: str, tmp_path: Path) -> None:
    ids = PROMPT
    with Probe(built(tmp_path, family, precision="fp32", tp=2)) as probe:
        have = probe.logits(ids)
    np.testing.assert_allclose(have, reference(family, ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fp8_stays_close(family: str, tmp_path: Path) -> None:
    with Probe(built(tmp_path, family, precision="fp8")) as probe:
        have = probe.logits(PROMPT).astype(np.float64)
    want = reference(family, PROMPT)
    cosine = (want * have).sum(-1) / (np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1))
    assert cosine.mean() >= 0.98
    assert cosine.max() < 0.99999  # it is quantised


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    plans = [built(tmp_path / folder, "llama", precision="fp8", tp=2) for folder in ("a", "b")]
    assert plans[0].read_bytes() == plans[1].read_bytes()


def test_passes_can_be_verified_on_a_users_model(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "llama", "llama")
    report = llmc.build(
        checkpoint,
        tmp_path / "engine.plan",
        precision="fp8",
        tp=2,
        verify_passes=True,
        evaluate=False,
        profile=SMALL,
    )
    assert report.plan_bytes > 0
