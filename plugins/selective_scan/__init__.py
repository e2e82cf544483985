"""selective_scan: the recurrence of Mamba (Gu and Dao 2023, arXiv 2312.00752), one decay a channel and state entry.

Comes in: x, B, C and step sizes of a step. Goes out: y; the state is changed. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """For channel c: S[n] = exp(dt A[c, n]) S[n] + dt B[n] x, y = sum_n C[n] S[n], with `skip` + D[c] x. `state`
    numbers S. dt is what is multiplied: softplus comes before.
    """

    state: int
    channels: int
    state_size: int
    skip: bool = False


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[T,C], B and C f32[T,N], dt f32[T,C], A f32[C,N] (, D f32[C]) -> f32[T,C]."""
    widths = (attrs.channels, attrs.state_size, attrs.state_size, attrs.channels)
    expected = [TensorType("f32", ("T", width)) for width in widths]
    expected += [TensorType("f32", (attrs.channels, attrs.state_size))]
    expected += [TensorType("f32", (attrs.channels,))] * attrs.skip
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (expected[0],)


def state_shape(attrs: Attrs) -> tuple[int, ...]:
    """f32[N, C]."""
    return (attrs.state_size, attrs.channels)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64 within a step; the state between steps is f32, as in the kernel."""
    x, b, c, dt, a, *skip = (value.astype(np.float64) for value in inputs)
    y = np.empty_like(x)
    for first, last, state in context.sequences(attrs.state):
        s = state.astype(np.float64)
        for t in range(first, last):
            s = s * np.exp(dt[t] * a.T) + b[t][:, None] * (dt[t] * x[t])
            y[t] = c[t] @ s
        state[...] = s
    if attrs.skip:
        y += skip[0] * x
    return (y.astype(np.float32),)


OPERATOR = Operator("selective_scan", Attrs, infer, reference, state_shape=state_shape)
