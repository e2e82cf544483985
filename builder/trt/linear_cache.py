"""Keys and values in linear caches, which TensorRT's own attention reads. Comes in: a `Node`, an `Emitter`. Goes out:
tensors, and a network's inputs. Must not know: engines, files.

A layer's caches are bf16[num_seqs, kv_heads, max_context, head_dim], inputs and outputs of the network. TensorRT's
attention takes packed tokens on few GPUs only, so each sequence's queries are padded to the most that one has: the
input `query_index` i32[num_seqs, queries] says which token stands where (any of the sequence's own as padding),
`query_place` i32[T] where each token's result is then. `write_index` i32[num_seqs] is the position of a sequence's
first new token. Which keys a token sees is a mask worked out from its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmc.artifacts.types import Dim
from llmc.builder.ir import Graph, Node
from llmc.builder.trt.emitter import Emitter

_STEP_ARRAYS: dict[str, tuple[Dim, ...]] = {
    "positions": ("T",),
    "query_start": ("num_seqs_and_1",),
    "write_index": ("num_seqs",),
    "query_index": ("num_seqs", "queries"),
    "query_place": ("T",),
}


class LinearCache:
    """`inputs`: name -> dtype and shape of the arrays that a step has, some of them inputs of the graph itself; a cache
    is behind the step an output `NAME.out`. `layers`: the operators of the cache.
    """

    def __init__(self, graph: Graph, max_context: int) -> None:
        self.inputs: dict[str, tuple[str, tuple[Dim, ...]]] = {n: ("i32", dims) for n, dims in _STEP_ARRAYS.items()}
        for node in graph:
            if node.op == "rope_cache":
                dims = ("num_seqs", node.attrs.kv_heads, max_context, node.attrs.head_dim)
                self.inputs |= {f"{kind}.{node.attrs.layer}": ("bf16", dims) for kind in ("keys", "values")}
        self.layers: Mapping[str, Callable[[Emitter, Node], list[Any]]] = {
            "rope_cache": rope_cache,
            "paged_attention": attention,
        }


def rope_cache(e: Emitter, node: Node) -> list[Any]:
    """Norm and rotation of q and k, keys and values into the caches. Raises ValueError for a form that it has not."""
    a, (q, k, v, *rest) = node.attrs, [e.values[name] for name in node.inputs]
    if a.style != "half" or a.norm_last or a.norm_bias or a.kv_scales or a.value_dim != a.head_dim:
        raise ValueError("only pairs (i, i + rotary/2), and keys and values of one width in bf16, have a form here")
    if a.has_norm and (a.norm, a.norm_scope) != ("rms", "head"):
        raise ValueError(f"a {a.norm} norm over {a.norm_scope} has no TensorRT form here")
    heads = [e.reshape(x, (-1, n, a.head_dim)) for x, n in ((q, a.heads), (k, a.kv_heads), (v, a.kv_heads))]
    turns = [e.reshape(rest.pop(0), (-1, 1, a.rotary)) for _ in range(2)] if a.rotary else []
    for i in range(2):
        if a.has_norm:
            heads[i] = e.rms_normed(heads[i], rest.pop(0), a.qk_norm_eps, 3)
        if turns:
            heads[i] = _rotated(e, heads[i], turns, a.rotary, a.head_dim)
    for kind, x in zip(("keys", "values"), heads[1:], strict=True):
        name = f"{kind}.{a.layer}"
        new, before, mode = e.cast(x, "bf16"), e.values["write_index"], e.trt.KVCacheMode.LINEAR
        update = e.network.add_kv_cache_update(e.values[name], new, before, mode)
        update.update_form = e.trt.AttentionIOForm.PACKED_NHD
        update.update_lengths = e.values["query_start"]
        e.values[f"{name}.out"] = e.outputs[f"{name}.out"] = update.get_output(0)
    return [heads[0]]


def _rotated(e: Emitter, x: Any, turns: list[Any], rotary: int, width: int) -> Any:
    low, high = e.last_columns(x, 0, rotary // 2), e.last_columns(x, rotary // 2, rotary)
    head = e.concat([low, high], 2)
    turned = e.concat([e.apply("neg", high), low], 2)
    out = e.apply("add", e.apply("mul", head, turns[0]), e.apply("mul", turned, turns[1]))
    return out if rotary == width else e.concat([out, e.last_columns(x, rotary, width)], 2)


def attention(e: Emitter, node: Node) -> list[Any]:
    """Padded queries over the caches behind the step. Raises ValueError for a scoring that TensorRT's has not."""
    a = node.attrs
    if a.softcap or a.slopes or a.sinks:
        raise ValueError("TensorRT's attention has no softcap, slopes or sinks")
    keys, values = (e.values[f"{kind}.{a.layer}.out"] for kind in ("keys", "values"))
    q = e.cast(e.apply("mul", e.values[node.inputs[0]], e.number(a.scale, 3)), "bf16")
    q = e.transpose(e.gather(q, e.values["query_index"]), (0, 2, 1, 3))
    softmax, no_kind = e.trt.AttentionNormalizationOp.SOFTMAX, e.trt.CausalMaskKind.NONE
    layer = e.network.add_attention_v2(q, keys, values, softmax, no_kind)
    layer.mask = _seen(e, a.window, a.chunk, int(keys.shape[2]))
    layer.decomposable = True
    y = e.reshape(e.transpose(layer.get_output(0), (0, 2, 1, 3)), (-1, a.heads * a.head_dim))
    return [e.cast(e.gather(y, e.values["query_place"]), "f32")]


def _seen(e: Emitter, window: int | None, chunk: int | None, max_context: int) -> Any:
    """bool[num_seqs, 1, queries, max_context]: which keys each query sees; one for all layers that are alike."""
    name = f"seen.{window}.{chunk}"
    if name in e.values:
        return e.values[name]
    whole = lambda value: e.constant(np.full((1,) * 4, value, np.int32), "i32")  # noqa: E731
    # A 0 keeps the axis as it is.
    position = e.reshape(e.gather(e.values["positions"], e.values["query_index"]), (0, 1, -1, 1))
    key = e.constant(np.arange(max_context, dtype=np.int32).reshape(1, 1, 1, -1), "i32")
    seen = e.binary("LESS", key, e.binary("SUM", position, whole(1)))
    if window is not None:
        seen = e.binary("AND", seen, e.binary("GREATER", key, e.binary("SUB", position, whole(window))))
    if chunk is not None:
        start = e.binary("PROD", e.binary("FLOOR_DIV", position, whole(chunk)), whole(chunk))
        seen = e.binary("AND", seen, e.binary("GREATER", key, e.binary("SUB", start, whole(1))))
    e.values[name] = seen
    return seen
