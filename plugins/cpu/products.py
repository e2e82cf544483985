"""Which instructions a launch multiplies with, by what it multiplies and what the target has.

Comes in: dtypes, widths, the features of a target. Goes out: `Products`. Must not know: launches, plans. The kernels
decide the same by macros and types (linear/products.h); a test holds one against the other.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

#: Columns and numbers that a step of AMX's tiles takes (linear/products.h, amx_tiles.h).
BF16_TILE, _INT8_TILE = 32, 64


class Products(IntEnum):
    """As abi.h numbers them: floats; INT8 in pairs of 16 bits; bf16 in pairs; AMX's tiles of bf16 and of INT8."""

    FLOATS = 0
    INT8_PAIRS = 1
    BF16_PAIRS = 2
    BF16_TILES = 3
    INT8_TILES = 4

    @property
    def label(self) -> str:
        """For people."""
        return ("float32", "INT8 pairs", "bf16 pairs", "bf16 tiles", "INT8 tiles")[self]


def linear_products(dtype: str, columns: int, features: Collection[str]) -> Products:
    """Of rows with a weight of that dtype and so many columns. Groups of INT4 are filled up to whole steps of tiles."""
    tiles = "amx_tile" in features
    if dtype == "i8":
        return Products.INT8_TILES if tiles and columns % _INT8_TILE == 0 else Products.INT8_PAIRS
    if dtype == "u4" and tiles:
        return Products.BF16_TILES
    if dtype not in ("bf16", "f8e4m3") or "avx512_bf16" not in features or columns % 2:
        return Products.FLOATS
    return Products.BF16_TILES if tiles and columns % BF16_TILE == 0 else Products.BF16_PAIRS
