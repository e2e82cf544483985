"""Rounding to the E4M3 grid in torch, and scales chosen for it.

Comes in: float32 tensors, scales, how much an error of each column costs. Goes out: grid values as float32, scales.
Must not know: models, where weights come from.
"""

from __future__ import annotations

import torch

from llmc.artifacts.types import FP8_MAX

_SMALLEST_NORMAL = 2.0**-6
#: Adding and subtracting it leaves a multiple of 2^-9, what E4M3 has below its smallest normal number.
_MAGIC = 1.5 * 2.0**14

#: Scales that are tried, relative to the largest magnitude / 448. Where E4M3's steps fall on a row's values repeats
#: with every power of two, so one octave upwards is all that is to be found without clipping; below 1 rows are clipped.
_WEIGHT_SCALES = tuple(2.0 ** (k / 8) for k in range(-2, 8))
#: The share of a row's magnitudes that another candidate leaves unclipped.
_PERCENTILE = 0.999
#: Elements whose scales are searched for at once: a few temporaries of them are held.
_BLOCK = 1 << 20
#: For an input's static scale: room for values that calibration did not see costs only the smallest numbers.
_INPUT_SCALES = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number (ties to even) of each element, as float32; saturated at 448."""
    x = x.clamp(-FP8_MAX, FP8_MAX)
    small = x.abs() < _SMALLEST_NORMAL
    bits = x.view(torch.int32)
    normal = bits >> 20
    normal &= 1
    normal += 0x7FFFF
    normal += bits
    normal &= -0x100000
    x += _MAGIC
    x -= _MAGIC
    return torch.where(small, x, normal.view(torch.float32), out=x)


def largest_scale(x: torch.Tensor) -> torch.Tensor:
    """f32[N, 1]: the largest magnitude of each row of x [N, K] / 448; 1 for a row without any."""
    scale = x.abs().amax(-1, keepdim=True) / FP8_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def per_token(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as a linear layer with per-token scales sees it."""
    scale = largest_scale(x)
    return round_e4m3(x / scale) * scale


def static(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x [T, K] as a linear layer with this static scale sees it; unchanged where there is none (0)."""
    return round_e4m3(x / scale) * scale if scale > 0 else x


def search_weight_scales(weight: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """f32[N, 1]: for each row of weight [N, K] the scale, of the largest magnitude's, a percentile's and those around
    them, with the least squared error; `cost` [K] weighs the columns.
    """
    step = max(_BLOCK // weight.shape[1], 1)
    return torch.cat([_search_block(rows, cost) for rows in weight.split(step)])


def _search_block(weight: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    largest = largest_scale(weight)
    percentile = largest_scale(torch.quantile(weight.abs(), _PERCENTILE, dim=1, keepdim=True))
    best, least = largest, torch.full_like(largest, torch.inf)
    for scale in (percentile, *(largest * factor for factor in _WEIGHT_SCALES)):
        error = ((round_e4m3(weight / scale) * scale - weight).square() @ cost)[:, None]
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def search_input_scale(x: torch.Tensor, amax: float, cost: torch.Tensor) -> float:
    """The static scale of an input x [T, K] whose largest magnitude is `amax`; `cost` [K] weighs the columns."""
    if amax <= 0:
        return 0.0  # an input that was always zero has no scale, and a static build says so
    scales = [float(torch.tensor(amax * factor / FP8_MAX)) for factor in _INPUT_SCALES]
    errors = [float(((round_e4m3(x / scale) * scale - x).square() @ cost).sum()) for scale in scales]
    return scales[errors.index(min(errors))]
