"""latent_cache: norm of the latent, rotary embedding of the shared key part and of the queries' part, and the write of
one row a token, [latent, rotated key part], into the paged cache: all heads read that row (multi-head latent attention,
DeepSeek-V2, arXiv 2405.04434).

Comes in: q, the latent, the key part, of a step, and its block tables. Goes out: the queries' rotated part; the cache
is changed. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext

STYLES = ("half", "interleaved")


@dataclass(frozen=True)
class Attrs:
    """`latent` and `rope` are the widths of a row's two parts. Each of the `heads` heads has q's columns / heads; its
    part to rotate begins at its column `q_start` and is `rope` wide. `style` None: nothing is rotated; "half" rotates
    the pairs (i, i + rope/2), "interleaved" (2i, 2i+1), in place. `norm_eps` None: the latent comes normed.
    """

    layer: int
    heads: int
    latent: int
    rope: int
    q_start: int = 0
    style: str | None = None
    norm_eps: float | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q f32[T,H*S], c f32[T,L], k f32[T,R] (, cos and sin of each pair f32[T,R/2]) (, norm weight f32[L])
    -> f32[T,H*R].
    """
    a = attrs
    if a.style is not None and (a.style not in STYLES or a.rope % 2):
        raise ValueError(f"style {a.style!r} with rope={a.rope}: one of {', '.join(STYLES)}, and an even number")
    if min(a.heads, a.latent, a.rope) < 1 or a.q_start < 0:
        raise ValueError(f"heads={a.heads}, latent={a.latent}, rope={a.rope}, q_start={a.q_start} are no sizes")
    q = types[0] if types and types[0].dtype == "f32" and types[0].rank == 2 else None
    if q is None or not isinstance(q.shape[1], int) or q.shape[1] % a.heads:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected q f32[T,{a.heads}*S] first")
    if a.q_start + a.rope > q.shape[1] // a.heads:
        raise ValueError(f"{q} has no columns {a.q_start}:{a.q_start + a.rope} in each of {a.heads} heads")
    tokens = q.shape[0]
    expected = [q, TensorType("f32", (tokens, a.latent)), TensorType("f32", (tokens, a.rope))]
    expected += [TensorType("f32", (tokens, a.rope // 2))] * (2 * (a.style is not None))
    expected += [TensorType("f32", (a.latent,))] * (a.norm_eps is not None)
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (TensorType("f32", (tokens, a.heads * a.rope)),)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str) -> np.ndarray:
    """x [T,h,R] by cos and sin [T,R/2] of each pair."""
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    first, second = (slice(0, half), slice(half, None)) if style == "half" else (slice(0, None, 2), slice(1, None, 2))
    a, b, c, s = x[..., first], x[..., second], cos[:, None], sin[:, None]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64. Token i of sequence s is written to position context_len[s] - (tokens of s) + i."""
    a = attrs
    q, c, k, *rest = (x.astype(np.float64) for x in inputs)
    q = q.reshape(len(q), a.heads, -1)[..., a.q_start : a.q_start + a.rope]
    if a.style is not None:
        cos, sin = rest.pop(0), rest.pop(0)
        q, k = _rotate(q, cos, sin, a.style), _rotate(k[:, None], cos, sin, a.style)[:, 0]
    if a.norm_eps is not None:
        c = c / np.sqrt(np.mean(np.square(c), axis=-1, keepdims=True) + a.norm_eps) * rest.pop(0)
    row = np.concatenate([c, k], axis=-1).astype(np.float32)[:, None]
    cache = context.kv[a.layer].keys
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        positions = context.context_len[s] - (last - first) + np.arange(last - first)
        blocks = context.block_tables[s, positions // context.block_size]
        cache[blocks, positions % context.block_size] = row[first:last].astype(cache.dtype)
    return (q.reshape(len(q), -1).astype(np.float32),)


OPERATOR = Operator("latent_cache", Attrs, infer, reference)
