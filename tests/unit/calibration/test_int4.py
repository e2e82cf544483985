"""INT4 grids by search, and a calibration to them: the table, its file, and what it gains over plain rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.calibration import read_table
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.reference import load_reference
from llmc.builder.weights.int4 import int4_scale, int4_zero, quantize_int4
from llmc.builder.weights.rounded import RoundedWeights, scale_name, weight_name, zero_name
from llmc.calibration import CalibrationOptions, calibrate
from llmc.calibration.formats import FORMATS
from llmc.calibration.int4 import by_columns, nearest, search_groups
from llmc.calibration.modules import by_outputs, linear_modules
from llmc.plugins.linear import dequantize


@pytest.mark.parametrize("columns", [1, 128, 300])
def test_rounding_by_ranges_is_what_recipes_do(columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)) + torch.arange(-3.0, 4)[:, None]
    rounded, value = FORMATS["int4"].round(weight), weight.numpy()
    assert rounded.zero is not None
    scale, zero = int4_scale(value), int4_zero(value)
    np.testing.assert_array_equal(rounded.scale.numpy(), scale.astype(np.float32))
    np.testing.assert_array_equal(rounded.zero.numpy(), zero.astype(np.float32))
    np.testing.assert_array_equal(rounded.grid.numpy(), quantize_int4(value, scale, zero).astype(np.float32))
    np.testing.assert_array_equal(rounded.weight.numpy(), dequantize(quantize_int4(value, scale, zero), scale, zero))


def test_a_search_clips_what_costs_little() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 300, generator=generator)
    weight[:, 200] = 9  # an outlier in the second group
    cost = torch.ones(300)
    cost[200] = 1e-4
    scale, zero = search_groups(weight, cost)
    plain = FORMATS["int4"].round(weight)
    assert (scale[:, 1] < 0.8 * plain.scale[:, 1]).all()

    def error(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        value = (numbers - by_columns(zero, 300)) * by_columns(scale, 300)
        return ((value - weight).square() * cost).sum(1)

    found = nearest(weight, by_columns(scale, 300), by_columns(zero, 300))
    assert plain.zero is not None
    assert (error(found, scale, zero) < 0.9 * error(plain.grid, plain.scale, plain.zero)).all()


def test_a_table_of_int4_reads_back_and_its_weights_are_near(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = dataclasses.replace(CalibrationOptions.of("int4"), budget=1.0, lm_head_dtype="bf16")
    table = calibrate(checkpoint, options, tmp_path / "t.json")
    assert (table.weights, table.activations, table.version) == ("int4", "none", 3)
    assert read_table(tmp_path / "t.json") == table
    rounded = RoundedWeights.open(table)
    for path, module in linear_modules(load_reference(checkpoint)).items():
        weight = by_outputs(module).numpy()
        parts = [rounded.read(name(path)) for name in (weight_name, scale_name, zero_name)]
        assert [str(part.dtype) for part in parts] == ["uint4", "float16", "uint4"]
        off = np.linalg.norm(dequantize(parts[0], parts[1], parts[2]) - weight) / np.linalg.norm(weight)
        choice = table.tensors[path].choice
        assert choice is not None
        assert off == pytest.approx(choice.error, rel=1e-3)
        assert 0.02 < off < 0.25
        assert choice.loss > 0
