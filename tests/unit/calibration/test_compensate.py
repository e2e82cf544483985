"""Compensated rounding against plain rounding, in the norm that it is about: the output's error on the inputs."""

import pytest
import torch

from llmc.calibration.compensate import Hessian, compensate, fit_rows
from llmc.calibration.formats import FORMATS, Rounded
from llmc.calibration.grid import largest_scale, round_e4m3, search_weight_scales


def case(seed: int, tokens: int = 400, columns: int = 96, rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a few strong directions, as activations have, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
    x = mixed + 0.3 * torch.randn(tokens, columns, generator=generator)
    return x, torch.randn(rows, columns, generator=generator)


def error(x: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return float(((weight - rounded) @ x.T).square().mean())


@pytest.mark.parametrize("seed", range(5))
def test_the_output_is_nearer_than_with_plain_rounding(seed: int) -> None:
    x, weight = case(seed)
    scale = largest_scale(weight)
    plain = error(x, weight, round_e4m3(weight / scale) * scale)
    rounded = compensate(weight, Hessian(x))
    assert error(x, weight, rounded.weight) < 0.6 * plain
    torch.testing.assert_close(round_e4m3(rounded.grid), rounded.grid, rtol=0, atol=0)


def test_columns_that_do_not_depend_on_one_another_are_rounded_to_nearest() -> None:
    _, weight = case(0)
    x = torch.diag(torch.arange(4.0, 100.0))  # each token has one column
    rounded, energy = compensate(weight, Hessian(x)), x.square().mean(0)
    damped = energy + 0.02 * energy.mean()
    scale = search_weight_scales(weight, damped)
    torch.testing.assert_close(rounded.scale, scale, rtol=0, atol=0)
    torch.testing.assert_close(rounded.grid, round_e4m3(weight / scale), rtol=0, atol=0)


def test_inputs_that_are_always_zero_leave_plain_rounding() -> None:
    _, weight = case(2)
    rounded = compensate(weight, Hessian(torch.zeros(400, 96)))
    assert (rounded.weight - weight).abs().max() < 0.08 * weight.abs().max()


@pytest.mark.parametrize("tokens", [20, 400])  # fewer than columns, and more
def test_the_spread_is_the_factor_of_the_damped_moments_inverse(tokens: int) -> None:
    x, _ = case(4, tokens)
    hessian = Hessian(x)
    ordered = x[:, hessian.order]
    moment = ordered.T @ ordered / tokens
    energy = moment.diagonal().clone()
    assert (energy[1:] <= energy[:-1] * (1 + 1e-5)).all()
    moment.diagonal().add_(0.02 * energy.mean())
    spread = hessian.spread
    torch.testing.assert_close(spread, spread.triu(), rtol=0, atol=0)
    torch.testing.assert_close(spread.T @ spread @ moment, torch.eye(96), rtol=0, atol=2e-3)


def test_rows_are_fitted_by_least_squares() -> None:
    x, _ = case(3)
    rounded = Rounded(torch.ones(24, 96), torch.full((24, 1), 0.5))
    outputs = x @ rounded.weight.T
    wanted = outputs * torch.linspace(0.5, 2, 24)
    fitted = fit_rows(rounded, wanted, outputs)
    torch.testing.assert_close(x @ fitted.weight.T, wanted, rtol=1e-4, atol=1e-4)
    silent = fit_rows(rounded, wanted * 0, outputs * 0)
    torch.testing.assert_close(silent.scale, rounded.scale, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_int4_outputs_are_nearer_than_with_plain_rounding(seed: int) -> None:
    x, weight = case(seed, columns=300)
    int4 = FORMATS["int4"]
    rounded = compensate(weight, Hessian(x), int4)
    assert error(x, weight, rounded.weight) < 0.4 * error(x, weight, int4.round(weight).weight)
    assert rounded.zero is not None
    assert rounded.scale.shape == rounded.zero.shape == (24, 3)
    for numbers in (rounded.grid, rounded.zero):
        assert torch.equal(numbers, numbers.round().clamp(0, 15))
    fitted = fit_rows(rounded, x @ weight.T, x @ rounded.weight.T)
    assert torch.equal(fitted.scale, fitted.scale.half().float())


def test_int4_columns_that_do_not_depend_on_one_another_are_rounded_to_nearest() -> None:
    _, weight = case(0, columns=300)
    rounded = compensate(weight, Hessian(torch.diag(torch.arange(4.0, 304.0))), FORMATS["int4"])
    assert rounded.zero is not None
    group = torch.arange(300) // 128
    numbers = (weight / rounded.scale[:, group]).round() + rounded.zero[:, group]
    assert torch.equal(rounded.grid, numbers.clamp(0, 15))
