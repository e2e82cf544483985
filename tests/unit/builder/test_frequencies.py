"""Rotary frequencies that depend on the length of a sequence are those of the longest that is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import CheckpointError, UsageError
from llmc.builder.build import resolved_profile
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.interpreter import Batch, run
from llmc.builder.options import BuildOptions
from llmc.builder.reference import load_reference
from llmc.builder.reference import logits as reference_logits
from llmc.builder.trace import trace, trace_model
from llmc.builder.trace.frequencies import may_depend_on_length
from llmc.profiles import load_target
from llmc.tiny_model import save_tiny
from tests.models import tiny_config, tiny_model
from tests.unit.builder.weights_of import model_tensors, params_of

#: `original_max_position_embeddings`.
ORIGINAL = 32
#: Beyond the tiny models' `max_position_embeddings`.
LONG = 256 + 40


def rope(family: str, kind: str) -> dict[str, Any]:
    config = tiny_config(family)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors = {"short_factor": [1.0] * (head_dim // 2), "long_factor": [1.5 + i for i in range(head_dim // 2)]}
    scaling = {"longrope": {**factors, "original_max_position_embeddings": ORIGINAL}, "dynamic": {"factor": 2.0}}
    lengths = {"original_max_position_embeddings": ORIGINAL} if kind == "longrope" else {}
    return {
        **lengths,
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 1.0, **scaling[kind]},
    }


def logits(family: str, overrides: dict[str, Any], tokens: int, longest: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[tokens, V] of what is compiled for sequences of `longest`, and of transformers."""
    model = tiny_model(family, **overrides)
    traced = trace_model(tiny_config(family, **overrides), longest=longest)
    ids = [5 + i * 37 % 90 for i in range(tokens)]
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    inputs, context = Batch(traced.graph, capacities=(tokens,)).step([ids], rows="all")
    (have,) = run(traced.graph, inputs, context, params_of(model_tensors(model, traced.buffers)))
    return have.reshape(want.shape), want


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "family", "tokens", "longest"),
    [
        ("longrope", "phi3", ORIGINAL - 8, ORIGINAL),  # short factors, as everywhere in what is served
        ("longrope", "phi3", ORIGINAL + 8, None),  # long ones
        ("dynamic", "llama", ORIGINAL + 8, None),  # `max_position_embeddings`, as in training
        ("dynamic", "llama", LONG, LONG),  # a base for that length
    ],
)
def test_what_transformers_chooses_for_the_longest_sequence(
    kind: str, family: str, tokens: int, longest: int | None
) -> None:
    have, want = logits(family, rope(family, kind), tokens, longest)
    np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(300)
def test_long_factors_are_those_of_short_sequences_too() -> None:
    """Where transformers would take the short ones: an engine chooses once."""
    have, want = logits("phi3", rope("phi3", "longrope"), ORIGINAL - 8, None)
    assert np.abs(have - want).max() > 1e-2


@pytest.mark.timeout(300)
def test_the_base_of_long_sequences_is_that_of_short_ones_too(tmp_path: Path) -> None:
    """A profile may ask for `factor` times the positions; the report says what that means for short sequences."""
    overrides = rope("llama", "dynamic")
    have, want = logits("llama", overrides, ORIGINAL, LONG)
    assert np.abs(have - want).max() > 1e-3
    checkpoint = open_checkpoint(save_tiny(tmp_path / "model", tiny_model("llama", **overrides)))
    assert checkpoint.stretch == 2.0
    assert "dynamic" in trace(checkpoint, LONG).note
    assert not trace(checkpoint, 256).note
    ids = [5 + i * 37 % 90 for i in range(ORIGINAL)]
    np.testing.assert_allclose(reference_logits(load_reference(checkpoint, longest=LONG), ids), have, 1e-3, 1e-4)
    profile, options = tmp_path / "long.yaml", BuildOptions(profile=str(tmp_path / "long.yaml"))
    profile.write_text("token_ranges: [{min: 1, max: 16}]\nmax_seq_len: 512\n")
    assert resolved_profile(checkpoint, options, load_target("cpu")).max_seq_len == 512
    profile.write_text("token_ranges: [{min: 1, max: 16}]\nmax_seq_len: 513\n")
    with pytest.raises(UsageError, match="max_position_embeddings is 256 and its rope factor 2: at most 512"):
        resolved_profile(checkpoint, options, load_target("cpu"))


@pytest.mark.parametrize("factor", [0.5, None])
def test_a_factor_that_is_none_is_named(tmp_path: Path, factor: object) -> None:
    folder = save_tiny(tmp_path / "model", tiny_model("llama", **rope("llama", "dynamic")))
    config = json.loads((folder / "config.json").read_bytes())
    config["rope_parameters"]["factor"] = factor
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"config.json: factor of rope is {factor}, at least 1 is needed"):
        open_checkpoint(folder).stretch  # noqa: B018


@pytest.mark.timeout(300)
def test_the_reference_has_the_same_and_the_user_is_told(tmp_path: Path) -> None:
    """The gate compares the engine with the model as it is served, and the report says that it differs."""
    overrides = rope("phi3", "longrope")
    have, _ = logits("phi3", overrides, ORIGINAL - 8, None)
    checkpoint = open_checkpoint(save_tiny(tmp_path, tiny_model("phi3", **overrides)))
    longest = checkpoint.model_info().max_position_embeddings
    ids = [5 + i * 37 % 90 for i in range(ORIGINAL - 8)]
    np.testing.assert_allclose(reference_logits(load_reference(checkpoint, longest=longest), ids), have, 1e-3, 1e-4)
    assert "longrope" in trace(checkpoint, longest).note
    assert not trace(checkpoint, ORIGINAL).note


@pytest.mark.parametrize(
    ("config", "depends"),
    [
        ({"rope_parameters": {"rope_type": "llama3"}}, False),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"rope_scaling": None}, False),
    ],
)
def test_configs_that_name_such_a_rule(config: dict[str, Any], depends: bool) -> None:
    assert may_depend_on_length(config) == depends
