"""`attention` becomes `rope_cache` (writes keys and values to the cache) and `paged_attention` (reads it).

Comes in: attention over [T, heads, head_dim] values. Goes out: both operators on [T, heads * head_dim] values, still
without rotation and norms, which the next passes move in. A factor on queries or keys becomes part of the scale; for an
FP8 cache both operators get the scales of what it holds. Must not know: families, where those come from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import KVScales
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, Scalar, Value, View, first, op, report, size_of

_SCALED = op("mul", Value("x"), Scalar("factor")) | op("div", Value("x"), Scalar("divisor"))


def fuse_attention(graph: Graph, scales: Mapping[int, KVScales] | None = None) -> tuple[Graph, PassReport]:
    """Replaces every attention. `scales`: layer -> what its keys and values are divided by in the cache, one number
    each a KV head or one for all; None: they are kept as they are. Raises UnsupportedError for a layer without.
    """
    view, edit = View(graph), Edit(graph)
    matched = [node for node in graph if node.op == "attention"]
    for node in matched:
        edit.swap(node, *_paged(view, edit, node, scales))
    after = edit.finish()
    return after, report("fuse_attention", graph, after, len(matched), len(matched))


def _paged(view: View, edit: Edit, node: Node, scales: Mapping[int, KVScales] | None) -> list[Node]:
    a = node.attrs
    heads = size_of(view.types[node.inputs[0]].shape[1])
    v_dim = None if a.v_dim == a.head_dim else a.v_dim
    shared = {"layer": a.layer, "heads": heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim, "v_dim": v_dim}
    widths = (heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.v_dim)
    (query, of_query), (key, of_key) = (_unscaled(view, name) for name in node.inputs[:2])
    if scales is not None:
        shared["kv_scales"] = _of_layer(scales, node, of_key)
    flat = [
        edit.make("reshape", [name], [view.types[name]], {"shape": ("T", width)}, like=node, stem=name)
        for name, width in zip((query, key, node.inputs[2]), widths, strict=True)
    ]
    values, types = [f.out for f in flat], [f.type for f in flat]
    cache = edit.make("rope_cache", values, types, shared, like=node, stem=node.inputs[0])
    scoring = vars(a.scoring) | {"scale": a.scale * of_query * of_key}
    by_head = node.inputs[3:]
    types = [cache.type, *(view.types[name] for name in by_head)]
    paged = edit.make("paged_attention", [cache.out, *by_head], types, shared | scoring, like=node)
    shape = {"shape": node.type.shape}
    back = edit.make("reshape", [paged.out], [paged.type], shape, like=node, outputs=node.outputs)
    return [*flat, cache, paged, back]


def _of_layer(scales: Mapping[int, KVScales], node: Node, factor: float) -> KVScales:
    """The layer's scales, for keys without the factor that they were multiplied by."""
    a = node.attrs
    try:
        keys, values = (own * a.kv_heads if len(own) == 1 else own for own in scales[a.layer])
    except KeyError:
        raise UnsupportedError(
            f"attention @{node.path}: an FP8 cache needs scales, and there are none for the keys and values of layer "
            f"{a.layer}; build with --kv-cache-dtype bf16"
        ) from None
    if not len(keys) == len(values) == a.kv_heads:
        raise UnsupportedError(
            f"attention @{node.path}: layer {a.layer} has {a.kv_heads} KV heads, and there are scales for the keys of "
            f"{len(keys)} and the values of {len(values)}; build with --kv-cache-dtype bf16"
        )
    return tuple(float(np.float32(key / abs(factor))) for key in keys), values


def _unscaled(view: View, name: str) -> tuple[str, float]:
    """The value without a factor that it was multiplied by, before or after it was cut into heads; and the factor."""
    source = name
    while True:
        found = first(view, _SCALED, source)
        if found and view.only_user(source):
            rest, factor = _unscaled(view, found["x"])
            return rest, factor * (found["factor"] if "factor" in found else 1 / found["divisor"])
        reshape = view.producer(source, "reshape")
        if not reshape or not view.only_user(source):
            return name, 1.0
        source = reshape.inputs[0]
