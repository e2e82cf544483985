"""INT4 scales and zero points by group of 128 columns, chosen by search.

Comes in: float32 weights, how much an error of each column costs. Goes out: scales, zero points. Must not know: models,
where weights come from, in which order columns are rounded.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from llmc.artifacts.types import INT4_GROUP, INT4_MAX

#: Shares of a group's range that are tried. Below 1 its largest numbers are clipped, and all others get finer steps.
_SHARES = tuple(1 - k / 40 for k in range(17))
#: Elements whose scales are searched for at once: a few temporaries of them are held.
_BLOCK = 1 << 20
_F16_MAX = 65504.0


def search_groups(weight: torch.Tensor, cost: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f32[N, G] twice, scales (of f16's numbers) and zero points (0 to 15): for each group of each row of weight [N, K]
    those with the least squared error; `cost` [K] weighs the columns. The last group may be smaller.
    """
    missing = -weight.shape[1] % INT4_GROUP
    groups = pad(weight, (0, missing)).unflatten(1, (-1, INT4_GROUP))
    costs = pad(cost, (0, missing)).unflatten(0, (-1, INT4_GROUP))
    step = max(_BLOCK // weight.shape[1], 1)
    found = [_search_block(rows, costs) for rows in groups.split(step)]
    scales, zeros = zip(*found, strict=True)
    return torch.cat(scales), torch.cat(zeros)


def _search_block(groups: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of groups [N, G, 128]; costs [G, 128]."""
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    best, least = grid_of(low, high), torch.full_like(low, torch.inf)
    for share in _SHARES:
        scale, zero = grid_of(low * share, high * share)
        rounded = (nearest(groups, scale[..., None], zero[..., None]) - zero[..., None]) * scale[..., None]
        error = ((rounded - groups).square_() * costs).sum(-1)
        better = error < least
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
        least = torch.where(better, error, least)
    return best


def grid_of(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of a range that holds 0; scale 1 where it is no f16 number above zero."""
    scale = ((high - low) / INT4_MAX).clamp_max(_F16_MAX).half().float()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return scale, (-low / scale).round().clamp(0, INT4_MAX)


def nearest(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The numbers 0 to 15 that stand for what is nearest to the values."""
    return (values / scale).round_().add_(zero).clamp_(0, INT4_MAX)


def by_columns(groups: torch.Tensor, columns: int) -> torch.Tensor:
    """[N, G] -> [N, K]: each group's number at each of its columns."""
    return groups.repeat_interleave(INT4_GROUP, 1)[:, :columns]
