"""What a program of `rowwise` can call: name -> numpy. `cpu.h` and `plugins/cpu/functions.h` have the same for kernels.

Comes in: nothing. Goes out: `ELEMENTWISE`, `REDUCTIONS`, `top`. Must not know: who uses them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.plugins.pointwise.functions import ARITY

#: One number for each number, in another dtype.
CASTS = ("f32", "i32", "bool")

#: Elementwise functions -> how many operands they have.
ELEMENTWISE: dict[str, int] = {**ARITY, **dict.fromkeys(CASTS, 1)}

#: Functions of truths.
LOGICAL = frozenset({"logical_and", "logical_or", "logical_not"})

#: Over the last axis, which stays as 1.
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "reduce_mean": np.mean,
    "reduce_sum": np.sum,
    "reduce_max": np.max,
}


def top(x: np.ndarray, k: int, largest: bool = True) -> np.ndarray:
    """i32[..,k]: where the k largest (smallest) entries of each row of x[..,n] stand, best first, of equals the first.

    NaN counts as larger than everything, as in PyTorch.
    """
    nan = np.isnan(x)
    key = np.where(nan, 0, -x if largest else x)
    order = np.lexsort((key, ~nan if largest else nan), axis=-1)
    return order[..., :k].astype(np.int32)
