"""Recurrent operators of the cuda targets against their references, interpreted: outputs and what a sequence keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import TensorType
from llmc.plugins import OPERATORS
from tests.unit.cuda.harness import check, environment
from tests.unit.cuda.steps import paged_step

CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "convolution": ("causal_conv", {"channels": 150, "taps": 4}, ["f32[T,150]", "f32[150,4]"]),
    "convolution, silu": (
        "causal_conv",
        {"channels": 20, "taps": 3, "bias": True, "activation": "silu"},
        ["f32[T,20]", "f32[20,3]", "f32[20]"],
    ),
    "scan": (
        "selective_scan",
        {"channels": 70, "state_size": 16},
        ["f32[T,70]", "f32[T,16]", "f32[T,16]", "f32[T,70]", "f32[70,16]"],
    ),
    "scan, skip": (
        "selective_scan",
        {"channels": 9, "state_size": 5, "skip": True},
        ["f32[T,9]", "f32[T,5]", "f32[T,5]", "f32[T,9]", "f32[9,5]", "f32[9]"],
    ),
    "scan by head": (
        "ssd_scan",
        {"heads": 4, "head_dim": 20, "groups": 2, "state_size": 70},
        ["f32[T,80]", "f32[T,140]", "f32[T,140]", "f32[T,4]", "f32[4]"],
    ),
    "scan by head, skip": (
        "ssd_scan",
        {"heads": 3, "head_dim": 8, "groups": 1, "state_size": 5, "skip": True},
        ["f32[T,24]", "f32[T,5]", "f32[T,5]", "f32[T,3]", "f32[3]", "f32[3]"],
    ),
    "delta rule": (
        "gated_delta",
        {"heads": 4, "key_heads": 2, "key_dim": 20, "value_dim": 60, "scale": 0.3, "normalize": True},
        ["f32[T,40]", "f32[T,40]", "f32[T,240]", "f32[T,4]", "f32[T,4]"],
    ),
    "delta rule, a decay for each entry": (
        "gated_delta",
        {"heads": 2, "key_heads": 2, "key_dim": 9, "value_dim": 5, "scale": 0.25, "per_key": True},
        ["f32[T,18]", "f32[T,18]", "f32[T,10]", "f32[T,18]", "f32[T,2]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 3, 50]), st.integers(1, 7)), min_size=1, max_size=3),
    padded=st.integers(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=3, deadline=None)
def test_matches_reference(name: str, lengths: list[tuple[int, int]], padded: int, seed: int) -> None:
    operator, given, texts = CASES[name]
    rng = np.random.default_rng(seed)
    attrs = OPERATORS[operator].attrs(state=2, **given)
    step, _ = paged_step(lengths, 16, rng, padded)
    slots = len(lengths) + 2
    step.context.states[2] = rng.standard_normal((slots, *OPERATORS[operator].state_shape(attrs))).astype(np.float32)
    step.context.state_slots = rng.permutation(slots)[: len(lengths)].astype(np.int32)
    types = [TensorType.parse(text) for text in texts]
    tokens = int(step.context.query_start[-1])
    inputs = [rng.standard_normal([tokens if d == "T" else d for d in t.shape]).astype(np.float32) for t in types]
    if operator == "gated_delta":  # decays below 1, rates between 0 and 1: what it converges for
        inputs[1] *= 0.3
        inputs[3], inputs[4] = -np.abs(inputs[3]), 1 / (1 + np.exp(-inputs[4]))
    elif operator != "causal_conv":
        inputs[3], inputs[4] = np.abs(inputs[3]), -np.abs(inputs[4])
    env = environment(step, padded > 0, stored={("in", 0): "bf16"})
    check(OPERATORS[operator], attrs, types, inputs, step, env, rtol=1e-4, atol=1e-4)
