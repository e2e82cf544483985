"""Latent attention from checkpoint folder to engine, beside Hugging Face, and what its cache takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc.runtime.selftest import Probe
from tests.builds import SMALL
from tests.models import LATENT_FAMILIES, save_checkpoint, tiny_model

PROMPT = [5 + i * 37 % 290 for i in range(40)]
DECODED = 16

pytestmark = pytest.mark.timeout(600)


def built(tmp_path: Path, family: str, **options: object) -> Path:
    checkpoint = save_checkpoint(tmp_path / family, family)
    plan = tmp_path / f"{family}.plan"
    llmc.build(checkpoint, plan, evaluate=False, profile=SMALL, **options)
    return plan


def cosines(family: str, ids: list[int], have: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        want = tiny_model(family)(torch.tensor([ids])).logits[0].numpy().astype(np.float64)
    cosine: np.ndarray = (want * have).sum(-1) / (np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1))
    return cosine


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_engine_matches_hugging_face(family: str, tp: int, tmp_path: Path) -> None:
    """Prompt and decodes: the same logits and greedy tokens; two ranks have 2 and 1 of the 3 heads."""
    with Probe(built(tmp_path, family, precision="fp32", tp=tp)) as probe:
        (tokens,) = probe.greedy([PROMPT], DECODED)
        ids = PROMPT + tokens
        have = probe.logits(ids).astype(np.float64)
    assert cosines(family, ids, have).min() >= 0.99999
    with torch.inference_mode():
        want = tiny_model(family)(torch.tensor([ids])).logits[0]
    assert want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_lower_precision_stays_close(precision: str, tmp_path: Path) -> None:
    with Probe(built(tmp_path, "deepseek_v3", precision=precision)) as probe:
        have = probe.logits(PROMPT).astype(np.float64)
    cosine = cosines("deepseek_v3", PROMPT, have)
    assert cosine.mean() >= (0.999 if precision == "bf16" else 0.97)
    assert cosine.max() < 0.9999999  # it is rounded
