"""Experts are rounded for the tokens that are routed to them: nearer than to nearest, on text of no calibration too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.reference import load_reference
from llmc.builder.weights.rounded import RoundedWeights, scale_name, weight_name
from llmc.calibration import CalibrationOptions, calibrate
from llmc.calibration.data import documentation
from llmc.calibration.experts import Call, Experts, expert_modules, stack_names
from llmc.calibration.formats import FORMATS
from llmc.calibration.grid import largest_scale, round_e4m3
from llmc.tiny import tiny_config
from llmc.tiny_model import random_model, save_tiny

pytestmark = pytest.mark.timeout(300)
OPTIONS = CalibrationOptions(samples=14, tokens=64, activations="none", budget=1.0)


@cache
def checkpoint(folder: Path, family: str) -> Checkpoint:
    return open_checkpoint(save_tiny(folder / family, random_model(tiny_config(family))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("experts")
    return path


def with_weights(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """The model with other experts, each [E, N, K]."""
    for path, module in expert_modules(model).items():
        for name in stack_names(module):
            value = weights[f"{path}.{name}"]
            module._parameters[name] = torch.nn.Parameter(
                value.transpose(1, 2).contiguous() if module.is_transposed else value, requires_grad=False
            )
    return model


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_the_model_is_nearer_than_with_experts_rounded_to_nearest(folder: Path, tmp_path: Path, family: str) -> None:
    """gpt_oss stores its matrices the other way round, interleaves gate and up, and has biases."""
    source = checkpoint(folder, family)
    table = calibrate(source, OPTIONS, tmp_path / "t.json")
    rounded, model = RoundedWeights.open(table), load_reference(source)
    ours, plain = {}, {}
    for path, module in expert_modules(model).items():
        for stack in (f"{path}.{name}" for name in stack_names(module)):
            grid = torch.from_numpy(rounded.read(weight_name(stack)).astype(np.float32))
            ours[stack] = grid * torch.from_numpy(rounded.read(scale_name(stack)))[..., None]
            weight = module.get_parameter(stack.rpartition(".")[2])
            weight = weight.transpose(1, 2) if module.is_transposed else weight
            assert table.tensors[stack].weight_amax == pytest.approx(weight.abs().amax((1, 2)).tolist())
            choice = table.tensors[stack].choice
            assert choice is not None
            lost = float((ours[stack] - weight).norm() / weight.norm())
            assert choice.error == pytest.approx(lost, rel=1e-3)
            scale = largest_scale(weight)
            plain[stack] = round_e4m3(weight / scale) * scale
    samples = torch.tensor(documentation(source, 6, 64, seed=5).ids)
    exact = model(samples).logits.log_softmax(-1)

    def divergence(weights: dict[str, torch.Tensor]) -> float:
        other = with_weights(load_reference(source), weights)(samples).logits.log_softmax(-1)
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    assert divergence(ours) < 0.8 * divergence(plain)


class Results:
    """Keeps matrices by stack and expert."""

    def __init__(self) -> None:
        self.weights: dict[tuple[str, int], torch.Tensor] = {}

    def expert(self, path: str, number: int, rounded: Any) -> None:
        self.weights[path, number] = rounded.weight

    def stack(self, path: str, stack: Any) -> None:
        pass


def test_padding_is_not_looked_at_and_an_expert_without_tokens_is_rounded_for_those_of_others(folder: Path) -> None:
    path, module = next(iter(expert_modules(load_reference(checkpoint(folder, "mixtral"))).items()))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 8, generator=generator) @ torch.randn(
        8, module.gate_up_proj.shape[2], generator=generator
    )
    real = torch.arange(400) < 300
    index = torch.randint(0, 4, (400, 2), generator=generator)
    found = []
    for padding in (0.0, 100.0):
        results, states = Results(), torch.where(real[:, None], hidden, padding)
        experts = Experts(path, module, FORMATS["fp8"], "none", lambda x, axis: x.abs().amax())
        call = Call(states, index, torch.ones(400, 2), real)
        experts.exact(call)
        experts.rounded(call, results)
        found.append(results.weights)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    weight = module.gate_up_proj[7]  # nobody chose it
    scale = largest_scale(weight)
    lost = [
        float((hidden[real] @ (w - weight).T).norm())
        for w in (found[0][f"{path}.gate_up_proj", 7], round_e4m3(weight / scale) * scale)
    ]
    assert lost[0] < 0.7 * lost[1]


class Told:
    """How much was done of how much, of rounding."""

    def __init__(self) -> None:
        self.rounding: list[tuple[int, int]] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        if what == "rounding":
            self.rounding.append((done, total))


def test_experts_that_are_read_one_by_one_are_rounded_alike(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (("resident", 1 << 30), ("streamed", 0)):
        monkeypatch.setattr("llmc.builder.reference.RESIDENT", limit)
        monkeypatch.setattr("llmc.builder.reference._SMALL", limit)
        options, told = CalibrationOptions(samples=4, tokens=32, budget=1.0), Told()
        count = len(calibrate(checkpoint(folder, "mixtral"), options, tmp_path / f"{name}.json", told).tensors)
        assert told.rounding == [(done, count) for done in range(1, count + 1)]
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("resident", "streamed")]
    assert files[0] == files[1]


@pytest.mark.parametrize(("precision", "activations"), [("fp8", "static"), ("int8", "token"), ("int4", "none")])
def test_a_plan_takes_the_experts_from_the_table(
    folder: Path, tmp_path: Path, precision: str, activations: str
) -> None:
    options = CalibrationOptions(samples=4, tokens=32, budget=1.0, activations=activations, weights=precision)
    calibrate(checkpoint(folder, "mixtral"), options, tmp_path / "t.json")
    fp8 = {"fp8_activations": activations, "fp8_budget": 1.0} if precision == "fp8" else {}
    profile = tmp_path / "short.yaml"
    profile.write_text("token_ranges: [{min: 1, opt: 16, max: 16}]\nmax_num_seqs: 4\nmax_seq_len: 32\nblock_size: 16\n")
    llmc.build(
        folder / "mixtral", tmp_path / "e.plan", precision=precision, calib=tmp_path / "t.json", tp=2,
        profile=str(profile), evaluate=False, **fp8,
    )  # fmt: skip
    plan = Plan.open(tmp_path / "e.plan")
    graph = bytes(plan.section("graph/rank1.ir")).decode()
    assert "stored('model.layers.0.mlp.experts.gate_up_proj.weight'" in graph
    assert "fp8(" not in graph
    assert "int4(" not in graph
    assert "int8(" not in graph
    notes = next(report.notes for report in plan.manifest.build.passes if report.name == "quantize")
    assert not any("rounded to nearest" in note for note in notes)
