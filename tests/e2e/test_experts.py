"""Mixtures of experts from a published checkpoint (each expert's matrices a tensor) to engine, beside Hugging Face."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.artifacts.plan import Plan
from llmc.runtime.selftest import Probe
from llmc.tiny import tiny_config
from llmc.tiny_model import random_model, save_tiny
from tests.builds import SMALL

PROMPT = [5 + i * 37 % 290 for i in range(40)]
DECODED = 16

pytestmark = pytest.mark.timeout(600)


@cache
def model(family: str) -> Any:
    return random_model(tiny_config(family))


def cosines(tmp_path: Path, family: str, **options: Any) -> tuple[np.ndarray, bool]:
    """Of the logits of prompt and greedy tokens, and whether the tokens are those of Hugging Face."""
    save_tiny(tmp_path / "model", model(family))
    options = {"evaluate": "gate" in options, **options}
    llmc.build(tmp_path / "model", tmp_path / "engine.plan", profile=SMALL, **options)
    with Probe(tmp_path / "engine.plan") as probe:
        (tokens,) = probe.greedy([PROMPT], DECODED)
        have = probe.logits(PROMPT + tokens).astype(np.float64)
    with torch.inference_mode():
        out = model(family)(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    want = out.numpy().astype(np.float64)
    cosine = (want * have).sum(-1) / (np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1))
    return cosine, want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens


def test_two_uneven_ranks_match_hugging_face(tmp_path: Path) -> None:
    cosine, same = cosines(tmp_path, "mixtral", precision="fp32", tp=2)
    assert cosine.min() >= 0.9999
    assert same


def test_int4_experts_are_near_hugging_face(tmp_path: Path) -> None:
    """On two ranks, of which the second begins within a group of 128 columns."""
    cosine, _ = cosines(tmp_path, "mixtral", precision="int4", tp=2)
    plan = Plan.open(tmp_path / "engine.plan")
    graph = bytes(plan.section("graph/rank1.ir")).decode()
    assert graph.count("grouped_linear(") == 4
    assert re.search(r"stored\('model\.layers\.0\.[a-z.]*experts\.down_proj\.weight_zero'", graph)
    assert re.search(r"grouped_linear\(.*group_start=[1-9]", graph)
    assert cosine.min() >= 0.9


def test_int8_experts_pass_the_gate_and_are_near_hugging_face(tmp_path: Path) -> None:
    loose = "top1=0.5,greedy=0.5"  # of random weights, whose best token changes easily
    cosine, _ = cosines(tmp_path, "mixtral", precision="int8", tp=2, gate=loose, eval_windows=2, eval_length=48)
    plan = Plan.open(tmp_path / "engine.plan")
    graph = bytes(plan.section("graph/rank1.ir")).decode()
    assert graph.count("grouped_linear(") == 4
    assert re.search(r"stored\('model\.layers\.0\.[a-z.]*experts\.down_proj\.weight', 'i8'\)", graph)
    quality = json.loads(bytes(plan.section("quality.json")))
    assert quality["verdict"] == "passed"
    assert 1e-7 < quality["kl"] < 0.01
    assert cosine.min() >= 0.98
