"""quantize: rows rounded to FP8 E4M3, each with its scale; what a matrix product with FP8 weights reads on a GPU.

Comes in: rows in f32. Goes out: their E4M3 numbers and scales. Must not know: builder, runtime. The cpu target has no
use for it: there `linear` rounds its x itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.linear import quantize_x
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """`scale`: that of every row; None: each row's largest magnitude / 448, and 1 for a row of zeros."""

    scale: float | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[..,K] -> f8e4m3[..,K], its scales f32[..,1]."""
    match types:
        case [TensorType(dtype="f32", shape=(*_, int()))]:
            pass
        case _:
            raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x f32[..,K]")
    return result_types("token" if attrs.scale is None else attrs.scale, types[0])


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Saturated at 448, rounded to nearest, halves to even."""
    return rounded("token" if attrs.scale is None else attrs.scale, inputs[0])


def result_types(how: float | str | None, x: TensorType) -> tuple[TensorType, ...]:
    """Of an operator that rounds its result x: by a scale, by "token", or not at all. Numbers come first, then scales.

    Raises ValueError where `how` is neither.
    """
    if how is None:
        return (x,)
    if how != "token" and (isinstance(how, str) or not 0 < np.float32(how) < np.inf):
        raise ValueError(f"rounding by {how!r}; expected None, 'token' or a positive float32")
    return TensorType("f8e4m3", x.shape), TensorType("f32", (*x.shape[:-1], 1))


def rounded(how: float | str | None, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `result_types` has the types of."""
    if how is None:
        return (x,)
    numbers, scales = quantize_x(x.reshape(-1, x.shape[-1]), None if isinstance(how, str) else how)
    return numbers.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)


OPERATOR = Operator("quantize", Attrs, infer, reference, rtol=0, atol=0, targets=("cuda",))
