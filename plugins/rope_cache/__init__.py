"""rope_cache: norm and rotary embedding of q and k, and the write of k and v into the paged cache.

Comes in: q, k, v of a step and its block tables. Goes out: the rotated q; the cache is changed. Must not know:
builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import FP8_MAX, NUMPY_DTYPES, KVScales, TensorType
from llmc.plugins.operator import Operator, StepContext, check_scales

STYLES = ("half", "interleaved")
NORMS = ("rms", "layer")
SCOPES = ("head", "each", "all")


@dataclass(frozen=True)
class Attrs:
    """`rotary`: how many leading dimensions of each head are rotated, 0 for none. `style`: which pairs are rotated,
    (i, i + rotary/2) for "half", (2i, 2i+1) for "interleaved". `v_dim`: the width of a value head, None: head_dim.

    `qk_norm_eps` None: no norm. `norm`: "rms" or "layer" (mean taken off; `norm_bias`: a bias is added). `norm_scope`:
    over each "head" with one weight for all; over "each" head with a weight of its own; over "all" heads at once (rms
    before the rotation only). `norm_last`: after the rotation instead of before. `norm_means`: the mean squares of a
    token's q and k are an input, because other ranks have some of the heads.

    `kv_scales`: each KV head's keys and values are divided by these before the cache's dtype rounds them.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int = 0
    style: str = "half"
    qk_norm_eps: float | None = None
    v_dim: int | None = None
    norm: str = "rms"
    norm_scope: str = "head"
    norm_bias: bool = False
    norm_last: bool = False
    norm_means: bool = False
    kv_scales: KVScales | None = None

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def has_norm(self) -> bool:
        """Whether q and k are normed."""
        return self.qk_norm_eps is not None


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q f32[T,H*D], k f32[T,KH*D], v f32[T,KH*DV] (, cos and sin f32[T,R]) (, weights of q and k) (, biases of q and k)
    (, means f32[T,2]) -> f32[T,H,D]. Weights and biases are f32[D], or f32[heads*D] where heads have their own.
    """
    _check(attrs)
    tokens = types[0].shape[0] if types and types[0].rank == 2 else "T"
    widths = [attrs.heads * attrs.head_dim, attrs.kv_heads * attrs.head_dim, attrs.kv_heads * attrs.value_dim]
    expected = [TensorType("f32", (tokens, n)) for n in widths]
    if attrs.rotary:
        expected += [TensorType("f32", (tokens, attrs.rotary))] * 2
    if attrs.has_norm:
        own = [attrs.head_dim] * 2 if attrs.norm_scope == "head" else widths[:2]
        expected += [TensorType("f32", (n,)) for n in own] * (1 + attrs.norm_bias)
    if attrs.norm_means:
        expected.append(TensorType("f32", (tokens, 2)))
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (TensorType("f32", (tokens, attrs.heads, attrs.head_dim)),)


def _check(a: Attrs) -> None:
    if a.kv_heads < 1 or a.heads % a.kv_heads:
        raise ValueError(f"heads={a.heads} is not a multiple of kv_heads={a.kv_heads}")
    for name, known in (("style", STYLES), ("norm", NORMS), ("norm_scope", SCOPES)):
        if getattr(a, name) not in known:
            raise ValueError(f"{name} {getattr(a, name)!r} is not one of {', '.join(known)}")
    if a.rotary % 2 or not 0 <= a.rotary <= a.head_dim:
        raise ValueError(f"rotary={a.rotary} is not an even number up to head_dim={a.head_dim}")
    if a.norm_scope == "all" and (a.norm != "rms" or a.norm_last):
        raise ValueError("a norm over all heads is an rms norm before the rotation")
    if a.norm_means and (not a.has_norm or a.norm_scope != "all"):
        raise ValueError("means are for a norm over all heads")
    check_scales(a.kv_scales, a.kv_heads)


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


def _norm(
    a: Attrs, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, square: np.ndarray | None
) -> np.ndarray:
    """x f32[T,h,D]; weight and bias f32[D] or f32[h*D]; `square` f32[T]: the mean square where it is given."""
    assert a.qk_norm_eps is not None
    shape = (1, -1, a.head_dim)
    if a.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True, dtype=np.float32)
    over = (-2, -1) if a.norm_scope == "all" else -1
    mean = np.mean(np.square(x, dtype=np.float32), axis=over, keepdims=True, dtype=np.float32)
    if square is not None:
        mean = square[:, None, None]
    x = x / np.sqrt(mean + np.float32(a.qk_norm_eps)) * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def stored(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x as the cache holds it: rounded to nearest even; E4M3 has no infinity, and saturates. NaN stays NaN."""
    return (np.clip(x, -FP8_MAX, FP8_MAX) if dtype == NUMPY_DTYPES["f8e4m3"] else x).astype(dtype)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Writes k and v of token i of sequence s to position context_len[s] - (tokens of s in this step) + i."""
    rest = list(inputs)
    q, k, v = (rest.pop(0) for _ in range(3))
    q, k = (x.reshape(len(x), -1, attrs.head_dim) for x in (q, k))
    v = v.reshape(len(v), -1, attrs.value_dim)
    cos, sin = (rest.pop(0), rest.pop(0)) if attrs.rotary else (None, None)
    pairs = [(rest.pop(0), rest.pop(0)) for _ in range(attrs.has_norm + (attrs.has_norm and attrs.norm_bias))]
    weights, biases = (*pairs, (None, None), (None, None))[:2]
    means = (rest[0][:, 0], rest[0][:, 1]) if attrs.norm_means else (None, None)

    def normed(x: np.ndarray, i: int) -> np.ndarray:
        weight = weights[i]
        return x if weight is None else _norm(attrs, x, weight, biases[i], means[i])

    if not attrs.norm_last:
        q, k = normed(q, 0), normed(k, 1)
    if cos is not None and sin is not None:
        q, k = (_rotate(x, cos, sin, attrs.style) for x in (q, k))
    if attrs.norm_last:
        q, k = normed(q, 0), normed(k, 1)
    cache = context.kv[attrs.layer]
    if attrs.kv_scales is not None:
        k, v = (x / np.array(own, np.float32)[:, None] for x, own in zip((k, v), attrs.kv_scales, strict=True))
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        positions = context.context_len[s] - (last - first) + np.arange(last - first)
        blocks = context.block_tables[s, positions // context.block_size]
        cache.keys[blocks, positions % context.block_size] = stored(k[first:last], cache.keys.dtype)
        cache.values[blocks, positions % context.block_size] = stored(v[first:last], cache.values.dtype)
    return (q.astype(np.float32),)


OPERATOR = Operator("rope_cache", Attrs, infer, reference)
