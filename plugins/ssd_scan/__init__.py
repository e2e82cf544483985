"""ssd_scan: the recurrence of Mamba-2 (state space duality; Dao and Gu 2024, arXiv 2405.21060), one decay a head.

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
    """For head h of group h // (heads / groups): S = exp(dt A) S + dt B x^T, y = C^T S, with `skip` + D x. `state`
    numbers S. dt is what is multiplied: softplus and limits come before.
    """

    state: int
    heads: int
    head_dim: int
    groups: int
    state_size: int
    skip: bool = False


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[T,H*P], B and C f32[T,G*N], dt f32[T,H], A f32[H] (, D f32[H]) -> f32[T,H*P]."""
    if attrs.groups < 1 or attrs.heads % attrs.groups:
        raise ValueError(f"heads={attrs.heads} is not a multiple of groups={attrs.groups}")
    widths = (attrs.heads * attrs.head_dim, *[attrs.groups * attrs.state_size] * 2, attrs.heads)
    expected = [TensorType("f32", ("T", width)) for width in widths]
    expected += [TensorType("f32", (attrs.heads,))] * (1 + attrs.skip)
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (expected[0],)


def state_shape(attrs: Attrs) -> tuple[int, ...]:
    """f32[H, N, P]."""
    return (attrs.heads, attrs.state_size, attrs.head_dim)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64 within a step; the state between steps is f32, as in the kernel."""
    x, b, c, dt, a, *skip = (value.astype(np.float64) for value in inputs)
    x = x.reshape(len(x), attrs.heads, attrs.head_dim)
    each = attrs.heads // attrs.groups
    b, c = (np.repeat(v.reshape(len(v), attrs.groups, -1), each, axis=1) for v in (b, c))
    y = np.empty_like(x)
    for first, last, state in context.sequences(attrs.state):
        s = state.astype(np.float64)
        for t in range(first, last):
            s = s * np.exp(dt[t] * a)[:, None, None] + (dt[t][:, None] * b[t])[:, :, None] * x[t][:, None, :]
            y[t] = np.einsum("hn,hnp->hp", c[t], s)
        state[...] = s
    if attrs.skip:
        y += skip[0][:, None] * x
    return (y.reshape(inputs[0].shape).astype(np.float32),)


OPERATOR = Operator("ssd_scan", Attrs, infer, reference, state_shape=state_shape)
