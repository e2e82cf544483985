"""Attention that models write out in operators is recognised by what it computes, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.interpreter import Batch, run
from llmc.builder.trace import trace_model
from llmc.builder.trace.written_out import _Place, _visible
from tests.unit.builder.weights_of import model_tensors, params_of

SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 90, "hidden_size": 24, "n_layer": 1, "n_head": 3},
    "mpt": {"vocab_size": 90, "d_model": 24, "n_heads": 3, "n_layers": 1, "max_seq_len": 64, "expansion_ratio": 2},
}
PROMPTS = [[5, 7, 9, 11, 13, 2, 3, 4, 8, 20, 21, 22], [30, 31, 32, 33]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", SIZES)
def test_biases_by_distance_are_recognised_and_tokens_of_sequences_stay_apart(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    traced = trace_model(config)
    (attention,) = [node for node in traced.graph if node.op == "attention"]
    assert (attention.attrs.slopes, attention.attrs.window, attention.attrs.softcap) == (True, None, None)
    assert attention.attrs.scale == pytest.approx(8**-0.5, rel=1e-6)
    params = params_of(model_tensors(model, traced.buffers))
    batch = Batch(traced.graph, capacities=(12, 4))
    with torch.inference_mode():
        want = [model(torch.tensor([ids]), use_cache=False).logits[0].numpy() for ids in PROMPTS]
    for first, last in ((0, 9), (9, 12)):
        cut = [slice(first, last), slice(first // 3, last // 3)]
        inputs, context = batch.step([ids[c] for ids, c in zip(PROMPTS, cut, strict=True)], rows="all")
        (logits,) = run(traced.graph, inputs, context, params)
        expected = np.concatenate([w[c] for w, c in zip(want, cut, strict=True)])
        np.testing.assert_allclose(logits.reshape(expected.shape), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "expected"),
    [(lambda i: 0, (None, None)), (lambda i: max(i - 4, 0), (5, None)), (lambda i: i - i % 4, (None, 4))],
)
def test_masks_are_read_off(first: Any, expected: tuple[int | None, int | None]) -> None:
    seen = torch.tensor([[first(i) <= j <= i for j in range(16)] for i in range(16)])
    assert _visible(_place(), seen) == expected


def test_a_mask_of_another_kind_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor a sliding window nor chunks"):
        _visible(_place(), torch.ones(16, 16, dtype=torch.bool))


def _place() -> _Place:
    node = torch.fx.Graph().placeholder("scores")
    return _Place(node, node, node)
