"""latent_attention: causal attention of all heads over one cached row a token: a latent, which is key and value, and a
rotated key part (multi-head latent attention in its absorbed form, DeepSeek-V2, arXiv 2405.04434, section 2.1).

Comes in: each head's query in latent space and its rotated part, the step's block tables; the cache holds this step's
rows already. Goes out: each head's mean of latents. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class Attrs:
    """Scores are (q . latent + q_rope . key part) * `scale`. A token at position p sees the positions 0..p."""

    layer: int
    heads: int
    latent: int
    rope: int
    scale: float


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q f32[T,H*L], q_rope f32[T,H*R] -> f32[T,H*L]."""
    a = attrs
    if min(a.heads, a.latent, a.rope) < 1:
        raise ValueError(f"heads={a.heads}, latent={a.latent}, rope={a.rope} are no sizes")
    tokens = types[0].shape[0] if types and types[0].rank else "T"
    expected = [TensorType("f32", (tokens, a.heads * width)) for width in (a.latent, a.rope)]
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (expected[0],)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64, so that the kernels are compared with the truth and not with another rounding."""
    a = attrs
    q, q_rope = (x.reshape(len(x), a.heads, -1).astype(np.float64) for x in inputs)
    queries = np.concatenate([q, q_rope], axis=-1)
    out = np.empty((len(q), a.heads, a.latent), np.float32)
    rows = context.kv[a.layer].keys
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        length = int(context.context_len[s])
        positions = np.arange(length)
        blocks = context.block_tables[s, positions // context.block_size]
        seen = rows[blocks, positions % context.block_size][:, 0].astype(np.float64)
        own = length - (last - first) + np.arange(last - first)
        scores = np.einsum("thd,kd->htk", queries[first:last], seen) * a.scale
        scores = np.where(positions[None, None, :] > own[None, :, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[first:last] = np.einsum("htk,kd->thd", weights, seen[:, : a.latent])
    return (out.reshape(len(out), -1),)


OPERATOR = Operator("latent_attention", Attrs, infer, reference)
