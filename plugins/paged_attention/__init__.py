"""paged_attention: causal attention of a step's queries over the paged cache, which already holds this step's keys.

Comes in: rotated q, the step's block tables. Goes out: the attended values. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """Scores are q.k * `scale`, then softcap * tanh(score / softcap). A token at position p sees the positions
    0..p, with `window` only the last `window` of them, its own included.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q f32[T,H,D] -> f32[T,H*D]."""
    if attrs.kv_heads < 1 or attrs.heads % attrs.kv_heads:
        raise ValueError(f"heads={attrs.heads} is not a multiple of kv_heads={attrs.kv_heads}")
    if attrs.window is not None and attrs.window < 1:
        raise ValueError(f"window={attrs.window} is not positive")
    if attrs.softcap is not None and not attrs.softcap > 0:
        raise ValueError(f"softcap={attrs.softcap} is not positive")
    tail = (attrs.heads, attrs.head_dim)
    if len(types) != 1 or types[0].dtype != "f32" or types[0].rank != 3 or types[0].shape[1:] != tail:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected f32[T,{attrs.heads},{attrs.head_dim}]")
    return (TensorType("f32", (types[0].shape[0], attrs.heads * attrs.head_dim)),)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64, so that the kernels are compared with the truth and not with another rounding."""
    (q,) = inputs
    out = np.empty((len(q), attrs.heads * attrs.head_dim), np.float32)
    cache = context.kv[attrs.layer]
    group = attrs.heads // attrs.kv_heads
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        length = int(context.context_len[s])
        positions = np.arange(length)
        blocks = context.block_tables[s, positions // context.block_size]
        keys = cache.keys[blocks, positions % context.block_size].astype(np.float64)
        values = cache.values[blocks, positions % context.block_size].astype(np.float64)
        own = length - (last - first) + np.arange(last - first)
        hidden = positions[None, :] > own[:, None]
        if attrs.window is not None:
            hidden |= positions[None, :] <= own[:, None] - attrs.window
        queries = q[first:last].reshape(last - first, attrs.kv_heads, group, attrs.head_dim).astype(np.float64)
        scores = np.einsum("tghd,kgd->gthk", queries, keys) * attrs.scale
        if attrs.softcap is not None:
            scores = attrs.softcap * np.tanh(scores / attrs.softcap)
        scores = np.where(hidden[None, :, None, :], -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[first:last] = np.einsum("gthk,kgd->tghd", weights, values).reshape(last - first, -1)
    return (out,)


OPERATOR = Operator("paged_attention", Attrs, infer, reference)
