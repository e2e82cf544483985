"""What a weight can be rounded to: E4M3 or INT8 with a scale by row, INT4 with scale and zero point by group of a row.

Comes in: float32 weights, how much an error of each column costs. Goes out: `Grid`s, `Rounded` weights. Must not know:
models, in which order columns are rounded, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from llmc.artifacts.types import FP8_MAX, INT4_GROUP
from llmc.calibration import grid, int4, int8


@dataclass(frozen=True)
class Rounded:
    """grid [N, K]: numbers of the format as float32. With scale [N, 1] of a row their product is the weight; with scale
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
        """grid, then scale [N] of rows, or scale and zero [N, G] of INT4."""
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

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] as a linear layer multiplies it that rounds each token by its own range; as it is, if none does."""

    def input_scale(self, x: torch.Tensor, amax: float, cost: torch.Tensor) -> float:
        """The static scale of an input x [T, K] whose largest magnitude is `amax`, 0 where there are no such; `cost`
        [K] weighs the columns.
        """

    def nbytes(self, rows: int, columns: int) -> float:
        """Bytes of a weight, scales included."""


@dataclass(frozen=True)
class _RowGrid:
    """`rounding`: to the nearest numbers that a scale multiplies."""

    scale: torch.Tensor
    rounding: Callable[[torch.Tensor], torch.Tensor]

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:
        return self.rounding(values / self.scale[:, 0])

    def value(self, numbers: torch.Tensor, column: int) -> torch.Tensor:
        return numbers * self.scale[:, 0]

    def rounded(self, numbers: torch.Tensor) -> Rounded:
        return Rounded(numbers, self.scale)


class E4m3:
    """FP8."""

    name = "fp8"

    def search(self, weight: torch.Tensor, cost: torch.Tensor) -> Grid:
        """Of scales by row."""
        return _RowGrid(grid.search_weight_scales(weight, cost), _nearest_e4m3)

    def round(self, weight: torch.Tensor) -> Rounded:
        """Each row's largest magnitude becomes 448."""
        scale = grid.largest_scale(weight)
        return Rounded(grid.round_e4m3(weight / scale), scale)

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Each token's largest magnitude becomes 448."""
        return grid.per_token(x)

    def input_scale(self, x: torch.Tensor, amax: float, cost: torch.Tensor) -> float:
        """By search."""
        return grid.search_input_scale(x, amax, cost)

    def nbytes(self, rows: int, columns: int) -> float:
        """A byte a number, four a row."""
        return rows * (columns + 4)


def _nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """`grid.round_e4m3` of few numbers."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


class Int8:
    """INT8, inputs too."""

    name = "int8"

    def search(self, weight: torch.Tensor, cost: torch.Tensor) -> Grid:
        """Of scales by row."""
        return _RowGrid(int8.search_scales(weight, cost), int8.round_int8)

    def round(self, weight: torch.Tensor) -> Rounded:
        """Each row's largest magnitude becomes 127."""
        scale = int8.largest_scale(weight)
        return Rounded(int8.round_int8(weight / scale), scale)

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Each token's largest magnitude becomes 127."""
        return int8.per_token(x)

    def input_scale(self, x: torch.Tensor, amax: float, cost: torch.Tensor) -> float:
        """None: each token has its own."""
        return 0.0

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

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs stay float32."""
        return x

    def input_scale(self, x: torch.Tensor, amax: float, cost: torch.Tensor) -> float:
        """That of E4M3, which a build may yet ask for."""
        return grid.search_input_scale(x, amax, cost)

    def nbytes(self, rows: int, columns: int) -> float:
        """Half a byte a number, two and a half a group."""
        return rows * (columns / 2 + 2.5 * -(-columns // INT4_GROUP))


#: By the precision of the build that they are for.
FORMATS: Mapping[str, Format] = {form.name: form for form in (E4m3(), Int8(), Int4())}
