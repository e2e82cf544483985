"""head_linear: each head's own matrix times that head's columns of x. The weight is fp32 or bf16.

Comes in: x with the columns of all heads side by side, one matrix a head. Goes out: the heads' results side by side.
Must not know: builder, runtime. There is no FP8: what it multiplies is no layer that a calibration has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """A head has x's columns / H of them; its matrix is multiplied by K of those, from its column `start` on."""

    start: int = 0


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[M,H*S], w f32|bf16 [H,N,K] with start + K <= S -> f32[M,H*N]."""
    if len(types) != 2 or types[0].dtype != "f32" or types[0].rank != 2 or types[1].rank != 3:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x f32[M,H*S] and w [H,N,K]")
    x, w = types
    heads, size, depth = w.shape
    if w.dtype not in ("f32", "bf16"):
        raise ValueError(f"the weight is {w}; expected f32 or bf16")
    width = x.shape[1]
    numbers = [d for d in (width, heads, size, depth) if isinstance(d, int) and d > 0]
    if len(numbers) != 4:
        raise ValueError(f"{x} times {w}: all dimensions but the rows of x must be numbers")
    width, heads, size, depth = numbers
    if width % heads or attrs.start < 0 or attrs.start + depth > width // heads:
        raise ValueError(f"{x} has no columns {attrs.start}:{attrs.start + depth} in each of {heads} heads")
    return (TensorType("f32", (x.shape[0], heads * size)),)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64."""
    x, w = inputs
    heads, _, depth = w.shape
    columns = x.reshape(len(x), heads, -1)[..., attrs.start : attrs.start + depth]
    y = np.einsum("mhk,hnk->mhn", columns.astype(np.float64), w.astype(np.float64))
    return (y.reshape(len(x), -1).astype(np.float32),)


OPERATOR = Operator("head_linear", Attrs, infer, reference, rtol=2e-5, atol=2e-5)
