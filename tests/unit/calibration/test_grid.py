"""Rounding in torch is the rounding of a cast; scales that are searched for are never worse than the largest's."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmc.artifacts.types import FP8_MAX
from llmc.calibration.grid import largest_scale, per_token, round_e4m3, search_input_scale, search_weight_scales
from llmc.plugins.linear import quantize_x


def test_every_region_rounds_like_a_cast() -> None:
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)])
    middles = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate(
        [grid, middles, np.nextafter(middles, 9e9), np.nextafter(middles, -9e9), [-0.0, 1e-30, 500]]
    )
    values = values.astype(np.float32)
    want = np.clip(values, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(round_e4m3(torch.from_numpy(values)).numpy(), want)


def test_per_token_is_what_the_kernels_reference_computes() -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
    x[3] = 0
    quantized, scale = quantize_x(x.numpy(), None)
    np.testing.assert_array_equal(per_token(x).numpy(), quantized.astype(np.float32) * scale)


def test_a_searched_scale_costs_no_more_than_the_largest_magnitudes() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 64, generator=generator) ** 3
    cost = torch.rand(64, generator=generator)

    def error(scale: torch.Tensor) -> torch.Tensor:
        return (round_e4m3(weight / scale) * scale - weight).square() @ cost

    found, largest = search_weight_scales(weight, cost), largest_scale(weight)
    assert (error(found) <= error(largest)).all()
    assert error(found).sum() < 0.97 * error(largest).sum()


@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_a_static_scale_is_chosen_by_error(outlier: float) -> None:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(2))
    x[0, 0] = outlier
    amax, cost = float(x.abs().max()), torch.ones(32)

    def error(scale: float) -> float:
        return float((round_e4m3(x / scale) * scale - x).square().sum())

    assert error(search_input_scale(x, amax, cost)) <= error(amax / FP8_MAX)
    assert search_input_scale(x * 0, 0.0, cost) == 0
