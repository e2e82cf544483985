"""attention: what a traced model calls for one layer: write keys and values to the paged cache, then attend causally.

Comes in: q, k, v of a step after rotation. Goes out: `OPERATORS`. Must not know: the plug-ins that replace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import Dim, TensorType
from llmc.plugins.operator import KVCache, Operator, StepContext
from llmc.plugins.paged_attention import Scoring, attend


@dataclass(frozen=True)
class AttentionAttrs:
    """`layer` numbers the cache. Query head h reads key head h // (heads / kv_heads). `v_dim` is the width of a value
    head, `head_dim` that of a query and key head. The others are those of `paged_attention.Scoring`.
    """

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    kv_heads: int
    head_dim: int
    v_dim: int
    chunk: int | None = None
    slopes: bool = False
    sinks: bool = False

    @property
    def scoring(self) -> Scoring:
        """How scores become weights."""
        return Scoring(self.scale, self.window, self.softcap, self.chunk, self.slopes, self.sinks)


def _infer(attrs: AttentionAttrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Traced: q [1,H,T,D], k [1,KH,T,D], v [1,KH,T,DV] -> [1,T,H,DV]. Canonical: the same as [T,H,D] -> [T,H,DV].
    Behind them f32[H] each: slopes, sinks.
    """
    a = attrs
    a.scoring.check()
    q = types[0] if types else None
    if len(types) < 3 or q is None or q.dtype != "f32" or q.rank not in (3, 4):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected q, k, v in f32 with 3 or 4 axes")
    traced = q.rank == 4
    heads, tokens = (q.shape[1], q.shape[2]) if traced else (q.shape[1], q.shape[0])
    if not isinstance(heads, int) or heads % a.kv_heads:
        raise ValueError(f"{heads} heads are not a multiple of kv_heads={a.kv_heads}")

    def expected(count: Dim, width: int) -> TensorType:
        return TensorType("f32", (1, count, tokens, width) if traced else (tokens, count, width))

    wanted = [expected(heads, a.head_dim), expected(a.kv_heads, a.head_dim), expected(a.kv_heads, a.v_dim)]
    wanted += a.scoring.head_inputs(heads)
    if tokens != "T" or list(types) != wanted:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected {', '.join(map(str, wanted))} over T")
    return (TensorType("f32", (1, tokens, heads, a.v_dim) if traced else (tokens, heads, a.v_dim)),)


def _reference(context: StepContext, attrs: AttentionAttrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Computed in float64 over the keys and values as the cache holds them."""
    traced = inputs[0].ndim == 4
    q, k, v = (x[0].transpose(1, 0, 2) for x in inputs[:3]) if traced else inputs[:3]
    cache = context.kv[attrs.layer]
    out = np.empty((*q.shape[:2], attrs.v_dim), np.float32)
    for s, (first, last) in enumerate(zip(context.query_start[:-1], context.query_start[1:], strict=True)):
        length = int(context.context_len[s])
        own = np.arange(length - (last - first), length)
        _write(cache, context, s, own, k[first:last], v[first:last])
        place = _place(context, s, np.arange(length))
        out[first:last] = attend(attrs.scoring, q[first:last], cache.keys[place], cache.values[place], own, inputs[3:])
    return (out[None] if traced else out,)


def _place(context: StepContext, sequence: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Block and entry of each position of a sequence."""
    return context.block_tables[sequence, positions // context.block_size], positions % context.block_size


def _write(cache: KVCache, context: StepContext, sequence: int, positions: np.ndarray,
           k: np.ndarray, v: np.ndarray) -> None:  # fmt: skip
    place = _place(context, sequence, positions)
    cache.keys[place], cache.values[place] = k.astype(cache.keys.dtype), v.astype(cache.values.dtype)


OPERATORS = (Operator("attention", AttentionAttrs, _infer, _reference),)
