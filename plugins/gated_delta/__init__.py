"""gated_delta: the gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464), with a decay for each head or
for each entry of its keys (Kimi delta attention, arXiv 2510.26692).

Comes in: q, k, v, decays and rates of a step. Goes out: what q reads; the state is changed. Must not know: builder,
runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext

#: What is added to the square of a key's or query's length before it is normalised.
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Attrs:
    """For head h, which uses key head h // (heads / key_heads): S = exp(g) S, S = S + k (beta (v - k^T S))^T, and the
    result is scale q^T S. `normalize`: q and k have length 1 first. `per_key`: a g for each entry of k instead of one a
    head. `state` numbers S.
    """

    state: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    normalize: bool = False
    per_key: bool = False


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q and k f32[T,KH*K], v f32[T,H*V], g f32[T,H] or per_key f32[T,H*K], beta f32[T,H] -> f32[T,H*V]."""
    if attrs.key_heads < 1 or attrs.heads % attrs.key_heads:
        raise ValueError(f"heads={attrs.heads} is not a multiple of key_heads={attrs.key_heads}")
    keys, decays = attrs.key_heads * attrs.key_dim, attrs.heads * (attrs.key_dim if attrs.per_key else 1)
    widths = (keys, keys, attrs.heads * attrs.value_dim, decays, attrs.heads)
    expected = [TensorType("f32", ("T", width)) for width in widths]
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (expected[2],)


def state_shape(attrs: Attrs) -> tuple[int, ...]:
    """f32[H, K, V]."""
    return (attrs.heads, attrs.key_dim, attrs.value_dim)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64 within a step; the state between steps is f32, as in the kernel."""
    q, k, v, g, beta = (value.astype(np.float64) for value in inputs)
    q, k = (x.reshape(len(x), attrs.key_heads, attrs.key_dim) for x in (q, k))
    if attrs.normalize:
        q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS) for x in (q, k))
    q, k = (np.repeat(x, attrs.heads // attrs.key_heads, axis=1) for x in (q * attrs.scale, k))
    v = v.reshape(len(v), attrs.heads, attrs.value_dim)
    decay = np.exp(g).reshape(len(g), attrs.heads, -1, 1)
    y = np.empty_like(v)
    for first, last, state in context.sequences(attrs.state):
        s = state.astype(np.float64)
        for t in range(first, last):
            s = s * decay[t]
            change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], s))
            s = s + k[t][:, :, None] * change[:, None, :]
            y[t] = np.einsum("hk,hkv->hv", q[t], s)
        state[...] = s
    return (y.reshape(inputs[2].shape).astype(np.float32),)


OPERATOR = Operator("gated_delta", Attrs, infer, reference, state_shape=state_shape)
