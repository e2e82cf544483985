"""How far each stored tensor is from the checkpoint's: measured while weights are streamed, which has both at hand.

Comes in: what recipes round, piece by piece. Goes out: a relative error by tensor. Must not know: graphs, plan files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from llmc.builder.weights.recipe import Cast, Fp8, Int4, Int8, Recipe, leaves
from llmc.plugins.linear import dequantize


class ErrorMeter:
    """Adds up squares over the pieces of a tensor; a piece that two forms share counts twice in both sums alike."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))

    def step(self, recipe: Recipe, values: Sequence[np.ndarray], result: np.ndarray) -> None:
        """Is told of each step of a recipe: the values that went in and the one that came out."""
        match recipe:
            case Cast():
                self._add(recipe, values[0], result.astype(np.float32))
            case Fp8() | Int8():
                self._add(recipe, values[0], result.astype(np.float32) * values[1][..., None])
            case Int4():
                self._add(recipe, values[0], dequantize(result, values[1], values[2]))

    def _add(self, recipe: Recipe, exact: np.ndarray, rounded: np.ndarray) -> None:
        names = {leaf.name for leaf in leaves(recipe)}
        if len(names) == 1:
            squares = (np.square(v).sum(dtype=np.float64) for v in (rounded - exact, exact))
            self._sums[names.pop()] += np.array([*squares])

    def errors(self) -> dict[str, float]:
        """Tensor -> root mean square of the error / of the tensor, to three digits: more could differ by machine."""
        return {
            name: float(f"{math.sqrt(off / whole):.3g}") if whole else 0.0
            for name, (off, whole) in sorted(self._sums.items())
        }
