"""What a weight can be rounded to: E4M3 with a scale by row, INT4 with a scale and a zero point by group of a row.

Comes in: float32 weights, how much an error of each column costs. Goes out: `Grid`s, `Rounded` weights. Must not know:
models, in which order columns are rounded, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from llmc.artifacts.types import FP8_MAX, INT4_GROUP
from llmc.calibration import int4
from llmc.calibration.grid import largest_scale, round_e4m3, search_weight_scales


@dataclass(frozen=True)
class Rounded:
    """grid [N, K]: numbers of the format as float32. With scale [N, 1] of E4M3 their product is the weight; with scale
    and zero [N, G] of INT4 it is (grid - zero) * scale, by groups of 128 columns.
    """

    grid: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """f32[N, K]"""
        if self.zero is None:
            return self.grid * self.scale
        columns = self.grid.shape[1]
        return (self.grid - int4.by_columns(self.zero, columns)) * int4.by_columns(self.scale, columns)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """grid, then scale [N] of E4M3, scale and zero [N, G] of INT4."""
        return (self.grid, self.scale[:, 0]) if self.zero is None else (self.grid, self.scale, self.zero)

    def times(self, factor: torch.Tensor) -> Rounded:
        """The weight times factor [N, 1]; a scale of INT4 is rounded to f16."""
        scale = self.scale * factor
        return replace(self, scale=scale if self.zero is None else scale.half().float())


class Grid(Protocol):
    """The numbers that one weight [N, K] may have."""

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:
        """Those nearest to a column's values [N], as `Rounded.grid` holds them."""

    def value(self, numbers: torch.Tensor, column: int) -> torch.Tensor:
        """What the numbers [N] of a column stand for."""

    def rounded(self, numbers: torch.Tensor) -> Rounded:
        """The weight with these numbers [N, K]."""


class Format(Protocol):
    """`name` as tables have it."""

    name: str

    def search(self, weight: torch.Tensor, cost: torch.Tensor) -> Grid:
        """The grid with the least squared error of rounding weight [N, K] to nearest; `cost` [K] weighs the columns."""

    def round(self, weight: torch.Tensor) -> Rounded:
        """The weight [N, K] rounded to nearest by its ranges."""

    def nbytes(self, rows: int, columns: int) -> float:
        """Bytes of a weight, scales included."""


@dataclass(frozen=True)
class _E4m3Grid:
    scale: torch.Tensor

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:
        return (values / self.scale[:, 0]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()

    def value(self, numbers: torch.Tensor, column: int) -> torch.Tensor:
        return numbers * self.scale[:, 0]

    def rounded(self, numbers: torch.Tensor) -> Rounded:
        return Rounded(numbers, self.scale)


class E4m3:
    """FP8."""

    name = "fp8"

    def search(self, weight: torch.Tensor, cost: torch.Tensor) -> Grid:
        """Of scales by row."""
        return _E4m3Grid(search_weight_scales(weight, cost))

    def round(self, weight: torch.Tensor) -> Rounded:
        """Each row's largest magnitude becomes 448."""
        scale = largest_scale(weight)
        return Rounded(round_e4m3(weight / scale), scale)

    def nbytes(self, rows: int, columns: int) -> float:
        """A byte a number, four a row."""
        return rows * (columns + 4)


@dataclass(frozen=True)
class _Int4Grid:
    scale: torch.Tensor
    zero: torch.Tensor

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:
        group = column // INT4_GROUP
        return int4.nearest(values, self.scale[:, group], self.zero[:, group])

    def value(self, numbers: torch.Tensor, column: int) -> torch.Tensor:
        group = column // INT4_GROUP
        return (numbers - self.zero[:, group]) * self.scale[:, group]

    def rounded(self, numbers: torch.Tensor) -> Rounded:
        return Rounded(numbers, self.scale, self.zero)


class Int4:
    """4-bit numbers, in groups whose grid is found before the first column is rounded, so that their order is free."""

    name = "int4"

    def search(self, weight: torch.Tensor, cost: torch.Tensor) -> Grid:
        """Of scales and zero points by group."""
        return _Int4Grid(*int4.search_groups(weight, cost))

    def round(self, weight: torch.Tensor) -> Rounded:
        """Each group's range, widened to hold 0, is divided into 15 steps."""
        missing = -weight.shape[1] % INT4_GROUP
        groups = torch.nn.functional.pad(weight, (0, missing)).unflatten(1, (-1, INT4_GROUP))
        scale, zero = int4.grid_of(groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0))
        columns = weight.shape[1]
        numbers = int4.nearest(weight, int4.by_columns(scale, columns), int4.by_columns(zero, columns))
        return Rounded(numbers, scale, zero)

    def nbytes(self, rows: int, columns: int) -> float:
        """Half a byte a number, two and a half a group."""
        return rows * (columns / 2 + 2.5 * -(-columns // INT4_GROUP))


#: By the precision of the build that they are for.
FORMATS: Mapping[str, Format] = {form.name: form for form in (E4m3(), Int4())}
