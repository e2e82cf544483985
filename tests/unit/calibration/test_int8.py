"""INT8 rounding, SmoothQuant's factors, and a calibration with them: the table, its file, what it gains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.calibration import read_table
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.reference import load_reference
from llmc.builder.weights.int8 import int8_scale, quantize_int8
from llmc.builder.weights.rounded import RoundedWeights, factors_name, scale_name, weight_name
from llmc.calibration import CalibrationOptions, calibrate
from llmc.calibration.formats import FORMATS
from llmc.calibration.int8 import largest_scale, per_token, round_int8, search_scales
from llmc.calibration.modelopt import Modelopt
from llmc.calibration.modules import by_outputs, linear_modules
from llmc.calibration.sensitivity import quantizer
from llmc.calibration.smooth import Smoother
from llmc.plugins.linear import quantize_x_int8
from llmc.tiny import tiny_config
from llmc.tiny_model import random_model, save_tiny


@pytest.fixture(scope="module")
def smoother() -> Smoother:
    return Smoother(Modelopt(), FORMATS["int8"], quantizer("token", FORMATS["int8"]))


def test_rounding_is_what_recipes_and_kernels_do() -> None:
    weight = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    rounded, value = FORMATS["int8"].round(weight), weight.numpy()
    np.testing.assert_array_equal(rounded.parts[1].numpy(), int8_scale(value))
    np.testing.assert_array_equal(rounded.grid.numpy(), quantize_int8(value, int8_scale(value)).astype(np.float32))
    numbers, scale = quantize_x_int8(value, None)
    np.testing.assert_array_equal(per_token(weight).numpy(), numbers.astype(np.float32) * scale)


def test_a_search_clips_what_costs_little() -> None:
    weight = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    weight[:, 200] = 9
    cost = torch.ones(300)
    cost[200] = 1e-4
    scale = search_scales(weight, cost)
    assert (scale < 0.8 * largest_scale(weight)).all()

    def error(scale: torch.Tensor) -> torch.Tensor:
        return ((round_int8(weight / scale) * scale - weight).square() * cost).sum(1)

    assert (error(scale) < 0.9 * error(largest_scale(weight))).all()


def test_factors_are_those_of_the_paper() -> None:
    inputs, weights = torch.rand(40) * 10 + 0.1, torch.rand(40) + 0.01
    inputs[3], weights[5] = 0, 0
    factors = Modelopt().factors(inputs, weights, 0.5)
    expected = (weights / inputs).sqrt()
    expected[[3, 5]] = 1
    torch.testing.assert_close(factors, expected)
    assert weights[5] == 0  # what was given stays as it was


def test_outliers_of_an_input_are_smoothed(smoother: Smoother) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(256, 64, generator=generator), torch.randn(32, 64, generator=generator)
    x[:, 7] *= 100
    found = smoother.search(x, [weight, weight[:5] * 2])
    assert found is not None
    _, factors = found
    assert factors[7] < 0.2 * factors.median()

    def error(factors: torch.Tensor) -> float:
        return float((per_token(x * factors) @ (weight / factors).T - x @ weight.T).norm())

    assert error(factors) < 0.3 * error(torch.ones(64))


def test_an_input_without_outliers_stays_as_it_is(smoother: Smoother) -> None:
    x = torch.where(torch.randn(256, 64, generator=torch.Generator().manual_seed(3)) > 0, 1.0, -1.0)
    weight = torch.rand(32, 64, generator=torch.Generator().manual_seed(4)) + 1  # any factors make numbers unequal
    assert smoother.search(x, [weight]) is None


def test_experts_are_rounded_and_what_they_read_is_not_smoothed(tmp_path: Path) -> None:
    model = random_model(tiny_config("mixtral"))
    save_tiny(tmp_path / "tiny", model)
    options = dataclasses.replace(CalibrationOptions.of("int8"), samples=2, tokens=32, budget=1.0)
    table = calibrate(open_checkpoint(tmp_path / "tiny"), options, tmp_path / "t.json")
    rounded, stacks = RoundedWeights.open(table), {path for path in table.tensors if ".experts." in path}
    assert len(stacks) == 2 * model.config.num_hidden_layers
    for path in stacks:
        choice, (numbers, scale) = table.tensors[path].choice, map(rounded.read, (weight_name(path), scale_name(path)))
        assert (str(numbers.dtype), numbers.ndim, scale.shape) == ("int8", 3, numbers.shape[:2])
        weight = model.get_parameter(path).detach().numpy()
        off = np.linalg.norm(numbers * scale[..., None] - weight) / np.linalg.norm(weight)
        assert choice is not None
        assert off == pytest.approx(choice.error, rel=1e-3)
        assert off < 0.03
    smoothed = {path for path, entry in table.tensors.items() if entry.choice and entry.choice.smoothing}
    assert smoothed
    assert all(".self_attn." in path for path in smoothed)


def test_a_table_of_int8_reads_back_and_its_weights_are_near(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = dataclasses.replace(CalibrationOptions.of("int8"), samples=2, tokens=64, budget=1.0)
    table = calibrate(checkpoint, options, tmp_path / "t.json")
    assert (table.weights, table.activations, table.version) == ("int8", "token", 4)
    assert read_table(tmp_path / "t.json") == table
    rounded, smoothed = RoundedWeights.open(table), {}
    for path, module in linear_modules(load_reference(checkpoint)).items():
        choice = table.tensors[path].choice
        assert choice is not None
        numbers, scale = rounded.read(weight_name(path)), rounded.read(scale_name(path))
        assert (str(numbers.dtype), str(scale.dtype)) == ("int8", "float32")
        value = numbers.astype(np.float32) * scale[:, None]
        if choice.smoothing is not None:
            smoothed[path] = choice.smoothing.module
            value *= rounded.read(factors_name(choice.smoothing.module))
        weight = by_outputs(module).numpy()
        off = np.linalg.norm(value - weight) / np.linalg.norm(weight)
        assert off == pytest.approx(choice.error, rel=1e-3)
        assert off < 0.03
    attention = {module for path, module in smoothed.items() if path.endswith(("q_proj", "k_proj", "v_proj"))}
    assert attention <= {f"model.layers.{i}.self_attn.q_proj" for i in range(9)}, "one input has one set of factors"
    assert attention
