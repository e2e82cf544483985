"""Attention that models write out in operators is recognised by what it computes, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.interpreter import Batch, run
from llmc.builder.trace import Traced, trace_model
from llmc.builder.trace.written_out import _Place, _visible
from tests.unit.builder.weights_of import model_tensors, params_of

#: Model type and config fields, by what is special about the attention.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "bias added in the product": ("bloom", {"vocab_size": 90, "hidden_size": 24, "n_layer": 1, "n_head": 3}),
    "bias added to scores": ("mpt", {"vocab_size": 90, "d_model": 24, "n_heads": 3, "n_layers": 1, "max_seq_len": 64,
                                     "expansion_ratio": 2}),
}  # fmt: skip
FALCON = {"vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
NEO = {"vocab_size": 90, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "window_size": 5,
       "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}  # fmt: skip
#: The same for those without a bias, whose forward makes tensors of Python numbers.
CONSTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one key head picked by a list": ("falcon", FALCON),
    "key heads of groups picked by a list": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "a mask with a value of its own": ("gpt_neo", NEO),
}
PROMPTS = [[5, 7, 9, 11, 13, 2, 3, 4, 8, 20, 21, 22], [30, 31, 32, 33]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", SIZES)
def test_biases_by_distance_are_recognised_and_tokens_of_sequences_stay_apart(form: str) -> None:
    kind, fields = SIZES[form]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    traced = trace_model(config)
    (attention,) = [node for node in traced.graph if node.op == "attention"]
    assert (attention.attrs.slopes, attention.attrs.window, attention.attrs.softcap) == (True, None, None)
    assert attention.attrs.scale == pytest.approx(8**-0.5, rel=1e-6)
    check_ragged(model, traced)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", CONSTANTS)
def test_constants_that_a_forward_makes_keep_their_values(form: str) -> None:
    kind, fields = CONSTANTS[form]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    traced = trace_model(config)
    windows = [node.attrs.window for node in traced.graph if node.op == "attention"]
    assert windows == ([None, 5] if "window_size" in fields else [None])
    check_ragged(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), traced)


def check_ragged(model: Any, traced: Traced) -> None:
    """Two sequences, in two steps each, give what the stock model gives for each alone."""
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
