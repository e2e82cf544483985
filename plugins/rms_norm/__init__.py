"""rms_norm: x / sqrt(mean(x^2) + eps) * w over the last axis, optionally of x + residual.

Comes in: x, w, the residual. Goes out: y, or (x + residual, y). Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.quantize import result_types, rounded


@dataclass(frozen=True)
class Attrs:
    """`residual`: a third input is added to x first, and the sum is the first output. `quantize`: y is rounded to FP8
    E4M3 by rows, with that scale or "token" (see the operator `quantize`), and the scales are one more output.
    """

    eps: float
    residual: bool = False
    quantize: float | str | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[..,H], w f32[H] (, residual f32[..,H]) -> y f32[..,H], or (sum, y).

    With `quantize` y is f8e4m3[..,H], and scales f32[..,1] follow.
    """
    x = types[0] if types else None
    if x is None or x.dtype != "f32" or not x.rank or not isinstance(x.shape[-1], int):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x f32[..,H] first")
    expected = [x, TensorType("f32", x.shape[-1:]), *([x] if attrs.residual else [])]
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (*[x] * attrs.residual, *result_types(attrs.quantize, x))


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The mean is taken in float64."""
    x, w = inputs[0], inputs[1]
    if attrs.residual:
        x = x + inputs[2]
    square = np.mean(np.square(x.astype(np.float64)), axis=-1, keepdims=True)
    y = (x / np.sqrt(square + attrs.eps) * w).astype(np.float32)
    return (*[x] * attrs.residual, *rounded(attrs.quantize, y))


OPERATOR = Operator("rms_norm", Attrs, infer, reference)
