"""Rounding to INT8 with one scale a row, and scales chosen for it.

Comes in: float32 tensors, how much an error of each column costs. Goes out: whole numbers as float32, scales. Must not
know: models, where weights come from.
"""

from __future__ import annotations

import torch

from llmc.artifacts.types import INT8_MAX

#: Shares of a row's largest magnitude that are tried. Below 1 it is clipped, and all others get finer steps.
_SHARES = tuple(1 - k / 40 for k in range(17))
#: Elements whose scales are searched for at once: a few temporaries of them are held.
_BLOCK = 1 << 20


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """The nearest whole number (ties to even) of each element, saturated at 127."""
    return x.round().clamp_(-INT8_MAX, INT8_MAX)


def largest_scale(x: torch.Tensor) -> torch.Tensor:
    """f32[N, 1]: the largest magnitude of each row of x [N, K] / 127; 1 where that is no float above zero."""
    scale = x.abs().amax(-1, keepdim=True) / INT8_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def per_token(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as a linear layer with per-token scales sees it."""
    scale = largest_scale(x)
    return round_int8(x / scale) * scale


def search_scales(weight: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """f32[N, 1]: for each row of weight [N, K] the scale with the least squared error; `cost` [K] weighs columns."""
    step = max(_BLOCK // weight.shape[1], 1)
    return torch.cat([_search_block(rows, cost) for rows in weight.split(step)])


def _search_block(weight: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    largest = largest_scale(weight)
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in _SHARES:
        scale = largest * share
        error = ((round_int8(weight / scale) * scale - weight).square() @ cost)[:, None]
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best
