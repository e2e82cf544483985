"""paged_attention: causal attention of a step's queries over the paged cache, which already holds this step's keys.

Comes in: rotated q, the step's block tables. Goes out: the attended values. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import KVScales, TensorType
from llmc.plugins.operator import Operator, StepContext, check_scales


@dataclass(frozen=True)
class Scoring:
    """How scores become weights. Scores are q.k * `scale`, then softcap * tanh(score / softcap). With `slopes` each
    query head h adds slopes[h] * (key position - query position) (ALiBi: https://arxiv.org/abs/2108.12409). A token at
    position p sees the positions 0..p; with `window` only the last `window` of them, its own included; with `chunk`
    only those from the last multiple of `chunk` on. With `sinks` the softmax of query head h has one term more,
    exp(sinks[h]), that belongs to no value (https://arxiv.org/abs/2309.17453).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    slopes: bool = False
    sinks: bool = False

    def check(self) -> None:
        """Raises ValueError for a window, chunk or softcap that is not positive."""
        for name in ("window", "chunk", "softcap"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                raise ValueError(f"{name}={given} is not positive")

    def head_inputs(self, heads: int) -> list[TensorType]:
        """The types of the inputs that give one number for each query head: slopes, then sinks, where there are any."""
        return [TensorType("f32", (heads,))] * (self.slopes + self.sinks)


@dataclass(frozen=True)
class Attrs:
    """`layer` numbers the cache. Query head h reads key head h // (heads / kv_heads). `head_dim` is the width of a
    query and key head, `v_dim` that of a value head (None: the same). `kv_scales`: what the cache's keys and values
    were divided by, one number each a KV head. The others are those of `Scoring`.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    v_dim: int | None = None
    chunk: int | None = None
    slopes: bool = False
    sinks: bool = False
    kv_scales: KVScales | None = None

    @property
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def scoring(self) -> Scoring:
        """How scores become weights."""
        return Scoring(self.scale, self.window, self.softcap, self.chunk, self.slopes, self.sinks)


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """q f32[T,H,D] (, slopes f32[H]) (, sinks f32[H]) -> f32[T,H*DV]."""
    if attrs.kv_heads < 1 or attrs.heads % attrs.kv_heads:
        raise ValueError(f"heads={attrs.heads} is not a multiple of kv_heads={attrs.kv_heads}")
    attrs.scoring.check()
    check_scales(attrs.kv_scales, attrs.kv_heads)
    q = TensorType("f32", ("T", attrs.heads, attrs.head_dim))
    if types and types[0].rank == 3:
        q = TensorType("f32", (types[0].shape[0], *q.shape[1:]))
    expected = [q, *attrs.scoring.head_inputs(attrs.heads)]
    if list(types) != expected:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, expected))}")
    return (TensorType("f32", (q.shape[0], attrs.heads * attrs.value_dim)),)


def attend(scoring: Scoring, q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray,
           by_head: Sequence[np.ndarray]) -> np.ndarray:  # fmt: skip
    """q [t,H,D] at `positions` over keys [n,KH,D] and values [n,KH,DV] of positions 0..n-1 -> f64[t,H,DV]. `by_head`:
    what `Scoring.head_inputs` names. In float64.
    """
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    heads, kv_heads = q.shape[1], keys.shape[1]
    distance = np.arange(len(keys))[None, :] - positions[:, None]  # of a key, seen from the query: 0 is its own
    seen = distance <= 0
    if scoring.window is not None:
        seen &= distance > -scoring.window
    if scoring.chunk is not None:
        seen &= distance >= -(positions[:, None] % scoring.chunk)
    queries = q.reshape(len(q), kv_heads, heads // kv_heads, q.shape[2])
    scores = np.einsum("tghd,kgd->ghtk", queries, keys).reshape(heads, len(q), len(keys)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * np.tanh(scores / scoring.softcap)
    rest = [x.astype(np.float64)[:, None, None] for x in by_head]
    if scoring.slopes:
        scores = scores + rest.pop(0) * distance
    scores = np.where(seen, scores, -np.inf)
    sinks = rest.pop(0) if scoring.sinks else np.full((heads, 1, 1), -np.inf)
    most = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    weights = np.exp(scores - most)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - most)
    weights = weights.reshape(kv_heads, heads // kv_heads, len(q), len(keys))
    return np.einsum("ghtk,kgd->tghd", weights, values).reshape(len(q), heads, values.shape[2])


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64, so that the kernels are compared with the truth and not with another rounding."""
    q, *by_head = inputs
    out = np.empty((len(q), attrs.heads * attrs.value_dim), np.float32)
    cache = context.kv[attrs.layer]
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        length = int(context.context_len[s])
        positions = np.arange(length)
        place = context.block_tables[s, positions // context.block_size], positions % context.block_size
        own = positions[length - (last - first) :]
        keys, values = cache.keys[place], cache.values[place]
        if attrs.kv_scales is not None:
            by_scale = zip((keys, values), attrs.kv_scales, strict=True)
            keys, values = (x.astype(np.float64) * np.array(scales, np.float32)[:, None] for x, scales in by_scale)
        attended = attend(attrs.scoring, q[first:last], keys, values, own, by_head)
        out[first:last] = attended.reshape(last - first, -1)
    return (out,)


OPERATOR = Operator("paged_attention", Attrs, infer, reference)
