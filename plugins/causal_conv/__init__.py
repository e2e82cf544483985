"""causal_conv: a depthwise convolution of each sequence over its own tokens, the last inputs kept between steps.

Comes in: x, one filter a channel, the bias. Goes out: y; the state is changed. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """y[t, c] = bias[c] + sum_k w[c, k] * x[t - taps + 1 + k, c], then silu where `activation` says so; x is 0 before a
    sequence begins. `state` numbers what is kept: the last `taps` - 1 inputs.
    """

    state: int
    channels: int
    taps: int
    bias: bool = False
    activation: str | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[T,C], w f32[C,taps] (, bias f32[C]) -> f32[T,C]."""
    if attrs.taps < 2 or attrs.activation not in (None, "silu"):
        raise ValueError(f"taps={attrs.taps}, activation={attrs.activation!r}; expected 2 or more and silu or none")
    x = TensorType("f32", ("T", attrs.channels))
    expected = [x, TensorType("f32", (attrs.channels, attrs.taps))]
    expected += [TensorType("f32", (attrs.channels,))] * attrs.bias
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (x,)


def state_shape(attrs: Attrs) -> tuple[int, ...]:
    """f32[taps - 1, C], the oldest input first."""
    return (attrs.taps - 1, attrs.channels)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Summed in float64."""
    x, w = inputs[0], inputs[1].astype(np.float64)
    y = np.empty(x.shape, np.float64)
    for first, last, state in context.sequences(attrs.state):
        window = np.concatenate([state, x[first:last]]).astype(np.float64)
        views = np.lib.stride_tricks.sliding_window_view(window, attrs.taps, axis=0)
        y[first:last] = np.einsum("tck,ck->tc", views, w)
        state[...] = window[-(attrs.taps - 1) :]
    if attrs.bias:
        y += inputs[2]
    if attrs.activation == "silu":
        y = y / (1 + np.exp(-y))
    return (y.astype(np.float32),)


OPERATOR = Operator("causal_conv", Attrs, infer, reference, state_shape=state_shape)
