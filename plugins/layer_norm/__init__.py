"""layer_norm: (x - mean) / sqrt(variance + eps) * w + b over the last axis, optionally of x + residual.

Comes in: x, w, b, the residual. Goes out: y, or (x + residual, y). Must not know: builder, runtime.
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
    """`residual`: a fourth input is added to x first, and the sum is the first output. `quantize`: y is rounded to FP8
    E4M3 by rows, with that scale or "token" (see the operator `quantize`), and the scales are one more output.
    """

    eps: float
    residual: bool = False
    quantize: float | str | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[..,H], w f32[H], b f32[H] (, residual f32[..,H]) -> y f32[..,H], or (sum, y).

    With `quantize` y is f8e4m3[..,H], and scales f32[..,1] follow.
    """
    x = types[0] if types else None
    if x is None or x.dtype != "f32" or not x.rank or not isinstance(x.shape[-1], int):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x f32[..,H] first")
    expected = [x, *[TensorType("f32", x.shape[-1:])] * 2, *([x] if attrs.residual else [])]
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (*[x] * attrs.residual, *result_types(attrs.quantize, x))


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Mean and variance are taken in float64, the variance from the deviations."""
    x, w, b = inputs[:3]
    if attrs.residual:
        x = x + inputs[3]
    deviation = x.astype(np.float64) - np.mean(x, axis=-1, keepdims=True, dtype=np.float64)
    variance = np.mean(np.square(deviation), axis=-1, keepdims=True)
    y = (deviation / np.sqrt(variance + attrs.eps) * w + b).astype(np.float32)
    return (*[x] * attrs.residual, *rounded(attrs.quantize, y))


OPERATOR = Operator("layer_norm", Attrs, infer, reference)
