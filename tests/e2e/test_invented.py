"""Modified models with parts that no pattern knows: they build, compute what torch computes, and report their cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import llmc
from llmc.runtime.selftest import Probe
from llmc.tiny_model import random_model, save_tiny
from tests.builds import SMALL

PROMPT = [5 + i * 37 % 290 for i in range(21)]


class InventedConfig(LlamaConfig):
    model_type = "llmc_invented"
    invention: str = "none"


class Swell(nn.Module):
    """An activation: x tanh(log(1 + x^2)), and a bounded parabola's arm below 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tanh(torch.log1p(x * x)) - 0.6 * torch.relu(-x).square().clamp(max=9.0)


class MeanAbsNorm(nn.Module):
    """A norm: by the mean magnitude, with the largest one taken off softly."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.abs().mean(-1, keepdim=True) + 0.1 * x.amax(-1, keepdim=True).exp().log1p()
        return self.weight * x / (size + 1e-5)


class Mixture(nn.Module):
    """A gate: an interpolation between the input and its sine, instead of a product."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, up = torch.sigmoid(self.gate(x)), self.up(x)
        return self.down(share * up + (1 - share) * torch.sin(up))


class InventedForCausalLM(LlamaForCausalLM):
    config_class = InventedConfig

    def __init__(self, config: InventedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if config.invention == "activation":
                layer.mlp.act_fn = Swell()
            elif config.invention == "norm":
                layer.post_attention_layernorm = MeanAbsNorm(config.hidden_size)
            elif config.invention == "gate":
                layer.mlp = Mixture(config.hidden_size, config.intermediate_size)


AutoConfig.register("llmc_invented", InventedConfig)
AutoModelForCausalLM.register(InventedConfig, InventedForCausalLM)


def build(folder: Path, invention: str):  # type: ignore[no-untyped-def]
    config = InventedConfig(
        invention=invention, vocab_size=300, hidden_size=72, intermediate_size=100, num_hidden_layers=2,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    )  # fmt: skip
    model = random_model(config)
    checkpoint = save_tiny(folder / "model", model)
    return model, llmc.build(checkpoint, folder / "engine.plan", precision="fp32", evaluate=False, profile=SMALL)


#: What generic code launches in a step of the plain model: it makes the rotary angles of all layers once.
PLAIN = {"copy": 1, "pointwise": 4}
#: What it launches in addition, in two layers: a norm's residual sum, magnitudes and two reductions stand apart.
COST = {
    "activation": {"pointwise": 2},
    "norm": {"pointwise": 8, "reduce": 4},
    "gate": {"pointwise": 2},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("invention", COST)
def test_an_invention_builds_and_says_what_it_costs(invention: str, tmp_path: Path) -> None:
    model, report = build(tmp_path, invention)
    with Probe(Path(report.plan)) as probe:
        have = probe.logits(PROMPT, chunk=8).astype(np.float64)
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0].numpy().astype(np.float64)
    np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-4)
    assert report.launches_generic == dict(Counter(PLAIN) + Counter(COST[invention]))
    assert dict(report.rows())["of generic code"].startswith(f"{sum(report.launches_generic.values())} (")
