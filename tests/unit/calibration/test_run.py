"""A whole calibration of tiny models: ranges are what plain hooks see, the budget holds, the same arguments give the
same files, the cache is hit, and the rounded weights come nearer to the model than plain rounding.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.calibration import CalibrationTable, read_table
from llmc.artifacts.errors import UsageError
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.reference import load_reference
from llmc.builder.weights.rounded import RoundedWeights, scale_name, weight_name
from llmc.calibration import CalibrationOptions, cached_table, calibrate, run
from llmc.calibration.data import documentation, read_samples
from llmc.calibration.grid import largest_scale, per_token, round_e4m3
from llmc.calibration.modules import by_outputs, linear_modules
from tests.models import save_checkpoint

SMALL = CalibrationOptions(samples=6, tokens=48, budget=1.15)


@pytest.fixture(scope="module")
def table(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> CalibrationTable:
    return calibrate(checkpoint, SMALL, tmp_path_factory.mktemp("table") / "t.json")


@pytest.mark.parametrize(("family", "linears"), [("gpt2", 9), ("llama", 15)])
def test_ranges_are_what_plain_hooks_see(family: str, linears: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path / "model", family))
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "the quick brown fox"}\n{"text": "the lazy dog jumps"}\n{"text": "a"}\n')
    options = CalibrationOptions(text, samples=8, tokens=64, seed=3)
    table = calibrate(checkpoint, options, tmp_path / "t.json")
    model, inputs = load_reference(checkpoint), dict[str, float]()
    for path, module in (linear_modules(model) | {"lm_head": model.lm_head}).items():

        def note(_: object, args: tuple[torch.Tensor], path: str = path) -> None:
            inputs[path] = max(inputs.get(path, 0.0), float(args[0].abs().max()))

        module.register_forward_pre_hook(note)
        amax = by_outputs(module).abs().amax(1).tolist()
        assert list(table.tensors[path].weight_amax) == amax, path
    for sample in read_samples(checkpoint, text, 8, 64, 3).ids:
        model(torch.tensor([sample]))
    assert {p: r.input_amax for p, r in table.tensors.items()} == pytest.approx(inputs, rel=1e-4)
    assert len(table.tensors) == linears
    assert (table.data.source, table.data.samples, table.checkpoint) == ("text of a.jsonl", 3, checkpoint.digest)


def test_the_file_reads_back_and_holds_every_module_that_is_not_kept(table: CalibrationTable) -> None:
    assert table.folder is not None
    assert read_table(table.folder / "t.json") == table
    rounded = RoundedWeights.open(table)
    for path, ranges in table.tensors.items():
        assert ranges.choice is not None
        if not ranges.choice.kept:
            rows = len(ranges.weight_amax)
            assert rounded.shape(weight_name(path))[0] == rows
            assert rounded.read(scale_name(path)).shape == (rows,)
            assert np.isfinite(rounded.read(weight_name(path)).astype(np.float32)).all()


@pytest.mark.parametrize("budget", [1.0, 1.3])
def test_the_budget_holds_and_is_used(checkpoint: Checkpoint, tmp_path: Path, budget: float) -> None:
    table = calibrate(checkpoint, dataclasses.replace(SMALL, budget=budget), tmp_path / "t.json")
    model = load_reference(checkpoint)
    modules = linear_modules(model) | {"lm_head": model.lm_head}
    fp8 = kept = 0
    for path, ranges in table.tensors.items():
        rows, columns = by_outputs(modules[path]).shape
        assert ranges.choice is not None
        fp8 += rows * (columns + 4)
        kept += (2 * rows * columns - rows * (columns + 4)) if ranges.choice.kept else 0
    assert kept <= (budget - 1) * fp8
    assert (kept > 0) == (budget > 1)
    gate_up = [[table.tensors[f"model.layers.{i}.mlp.{n}_proj"].choice for n in ("gate", "up")] for i in range(2)]
    assert all(gate.kept == up.kept for gate, up in gate_up if gate and up)


@pytest.mark.parametrize(("activations", "some"), [("token", True), ("static", False)])
def test_the_inputs_that_cost_most_stay_as_they_are(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: str, some: bool
) -> None:
    monkeypatch.setattr(run, "_KEPT_INPUTS", 0.2)
    table = calibrate(checkpoint, dataclasses.replace(SMALL, activations=activations, budget=1.0), tmp_path / "t.json")
    choices = {path: ranges.choice for path, ranges in table.tensors.items()}
    inputs = {path for path, choice in choices.items() if choice and choice.input_kept}
    size = {path: by_outputs(module).numel() for path, module in linear_modules(load_reference(checkpoint)).items()}
    assert sum(size[path] for path in inputs) <= 0.2 * (sum(size.values()) + 300 * 64)  # and the head
    assert bool(inputs) == some == (table.version == 5)


def test_the_same_arguments_give_the_same_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = dataclasses.replace(SMALL, activations="static")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        calibrate(checkpoint, options, tmp_path / name / "t.json")
    for file in ("t.json", "t.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["t.json", "t.safetensors"]


def test_rounded_weights_are_nearer_to_the_model_than_plain_ones(checkpoint: Checkpoint, tmp_path: Path) -> None:
    table = calibrate(checkpoint, CalibrationOptions(samples=14, tokens=64, budget=1.0), tmp_path / "t.json")
    rounded = RoundedWeights.open(table)
    samples = torch.tensor(documentation(checkpoint, 6, 64, seed=5).ids)
    model = load_reference(checkpoint)
    exact = model(samples).logits

    def divergence(weights: dict[str, torch.Tensor]) -> float:
        other = load_reference(checkpoint)
        for path, module in linear_modules(other).items():
            module._parameters["weight"] = torch.nn.Parameter(weights[path], requires_grad=False)
            module.register_forward_pre_hook(lambda _, args: (per_token(args[0]),))
        p, q = exact.log_softmax(-1), other(samples).logits.log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    plain, ours = {}, {}
    for path, module in linear_modules(model).items():
        scale = largest_scale(by_outputs(module))
        plain[path] = round_e4m3(by_outputs(module) / scale) * scale
        grid = torch.from_numpy(rounded.read(weight_name(path)).astype(np.float32))
        ours[path] = grid * torch.from_numpy(rounded.read(scale_name(path)))[:, None]
    assert divergence(ours) < 0.8 * divergence(plain)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_the_output_head_is_fp8_beside_any_weights(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """Rounded in runs of rows, with the error made up for: nearer than rounding to nearest on what it multiplies."""
    monkeypatch.setattr("llmc.calibration.modules._BLOCK", 64 * 100)
    options = CalibrationOptions(samples=14, tokens=64, activations="none", budget=1.0, weights=weights)
    table = calibrate(checkpoint, options, tmp_path / "t.json")
    assert (table.head, table.version) == ("lm_head", 4)
    assert read_table(tmp_path / "t.json") == table
    rounded, model = RoundedWeights.open(table), load_reference(checkpoint)
    grid, weight = rounded.read(weight_name("lm_head")), by_outputs(model.lm_head)
    ours = torch.from_numpy(grid.astype(np.float32) * rounded.read(scale_name("lm_head"))[:, None])
    scale = largest_scale(weight)
    plain = round_e4m3(weight / scale) * scale
    inputs = model.model(torch.tensor(documentation(checkpoint, 6, 64, seed=5).ids)).last_hidden_state
    lost = [float((inputs @ (w - weight).T).square().mean()) for w in (ours, plain)]
    assert lost[0] < 0.7 * lost[1]
    choice = table.tensors["lm_head"].choice
    assert choice is not None
    assert choice.error == pytest.approx(float((ours - weight).norm() / weight.norm()), rel=1e-4)
    assert choice.loss > 0


def test_an_output_head_that_stays_bf16_is_not_in_the_table(checkpoint: Checkpoint, tmp_path: Path) -> None:
    table = calibrate(checkpoint, dataclasses.replace(SMALL, lm_head_dtype="bf16"), tmp_path / "t.json")
    assert (table.head, table.version) == (None, 2)
    assert "lm_head" not in table.tensors


def test_a_model_that_is_read_as_it_runs_is_rounded_alike(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output head too, which is read in runs of rows."""
    for name, limit in (("resident", 1 << 30), ("streamed", 0)):
        monkeypatch.setattr("llmc.builder.reference.RESIDENT", limit)
        monkeypatch.setattr("llmc.builder.reference._SMALL", limit)
        calibrate(checkpoint, SMALL, tmp_path / f"{name}.json")
    weights = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("resident", "streamed")]
    assert weights[0] == weights[1]


def test_what_was_calibrated_once_is_taken_from_the_cache(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, reused = cached_table(checkpoint, SMALL)
    assert not reused
    monkeypatch.setattr(run, "_calibrate", lambda *_: pytest.fail("calibrated again"))
    again, reused = cached_table(checkpoint, SMALL)
    assert reused
    assert (again, again.folder) == (first, first.folder)
    with pytest.raises(pytest.fail.Exception, match="calibrated again"):
        cached_table(checkpoint, dataclasses.replace(SMALL, budget=1.2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 0}, "not 0 of 48"),
        ({"tokens": 257}, "257 tokens exceed the model's 256 positions"),
        ({"budget": 0.9}, r"budget of 0\.9 is outside"),
        ({"activations": "dynamic"}, "is not one of token, static, none"),
        ({"lm_head_dtype": "int4"}, "lm_head dtype 'int4' is not one of bf16, fp8"),
    ],
)
def test_options_that_cannot_be(checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        calibrate(checkpoint, dataclasses.replace(SMALL, **changes), tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []
