"""rope_cache: per-head norm and rotary embedding of q and k, and the write of k and v into the paged cache.

Comes in: q, k, v of a step and its block tables. Goes out: the rotated q; the cache is changed. Must not know:
builder, runtime.
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
    """`rotary`: how many leading dimensions of each head are rotated, 0 for none. `style`: which pairs are rotated,
    (i, i + rotary/2) for "half", (2i, 2i+1) for "interleaved". `qk_norm_eps` None: no norm per head.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int = 0
    style: str = "half"
    qk_norm_eps: float | None = None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q f32[T,H*D], k and v f32[T,KH*D] (, cos and sin f32[T,R]) (, q_w and k_w f32[D]) -> f32[T,H,D]."""
    if attrs.kv_heads < 1 or attrs.heads % attrs.kv_heads:
        raise ValueError(f"heads={attrs.heads} is not a multiple of kv_heads={attrs.kv_heads}")
    if attrs.style not in STYLES:
        raise ValueError(f"style {attrs.style!r} is not one of {', '.join(STYLES)}")
    if attrs.rotary % 2 or not 0 <= attrs.rotary <= attrs.head_dim:
        raise ValueError(f"rotary={attrs.rotary} is not an even number up to head_dim={attrs.head_dim}")
    tokens = types[0].shape[0] if types and types[0].rank == 2 else "T"
    width, kv_width = attrs.heads * attrs.head_dim, attrs.kv_heads * attrs.head_dim
    expected = [TensorType("f32", (tokens, n)) for n in (width, kv_width, kv_width)]
    if attrs.rotary:
        expected += [TensorType("f32", (tokens, attrs.rotary))] * 2
    if attrs.qk_norm_eps is not None:
        expected += [TensorType("f32", (attrs.head_dim,))] * 2
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (TensorType("f32", (tokens, attrs.heads, attrs.head_dim)),)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str) -> np.ndarray:
    """x f32[T,h,D] with its first R dimensions rotated by cos, sin f32[T,R], full width as Hugging Face has them."""
    width = cos.shape[-1]
    head, tail = x[..., :width], x[..., width:]
    turned = np.empty_like(head)
    if style == "half":
        turned[..., : width // 2], turned[..., width // 2 :] = -head[..., width // 2 :], head[..., : width // 2]
    else:
        turned[..., 0::2], turned[..., 1::2] = -head[..., 1::2], head[..., 0::2]
    return np.concatenate([head * cos[:, None] + turned * sin[:, None], tail], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    square = np.mean(np.square(x, dtype=np.float32), axis=-1, keepdims=True, dtype=np.float32)
    return x / np.sqrt(square + np.float32(eps)) * weight


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Writes k and v of token i of sequence s to position context_len[s] - (tokens of s in this step) + i."""
    rest = list(inputs)
    q, k, v = (rest.pop(0) for _ in range(3))
    q, k, v = (x.reshape(len(x), -1, attrs.head_dim) for x in (q, k, v))
    cos, sin = (rest.pop(0), rest.pop(0)) if attrs.rotary else (None, None)
    if attrs.qk_norm_eps is not None:
        q, k = (_norm(x, w, attrs.qk_norm_eps) for x, w in ((q, rest.pop(0)), (k, rest.pop(0))))
    if cos is not None and sin is not None:
        q, k = (_rotate(x, cos, sin, attrs.style) for x in (q, k))
    cache = context.kv[attrs.layer]
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        positions = context.context_len[s] - (last - first) + np.arange(last - first)
        blocks = context.block_tables[s, positions // context.block_size]
        cache.keys[blocks, positions % context.block_size] = k[first:last].astype(cache.keys.dtype)
        cache.values[blocks, positions % context.block_size] = v[first:last].astype(cache.values.dtype)
    return (q.astype(np.float32),)


OPERATOR = Operator("rope_cache", Attrs, infer, reference)
