"""`attention` becomes `rope_cache` (writes keys and values to the cache) and `paged_attention` (reads it).

Comes in: attention over [T, heads, head_dim] values. Goes out: both operators on [T, heads * head_dim] values, still
without rotation and norms, which the next passes move in. Must not know: families.
"""

from __future__ import annotations

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report, size_of


def fuse_attention(graph: Graph) -> tuple[Graph, PassReport]:
    """Replaces every attention; raises UnsupportedError for one whose values are of another width than its keys."""
    view, edit = View(graph), Edit(graph)
    matched = [node for node in graph if node.op == "attention"]
    for node in matched:
        edit.swap(node, *_paged(view, edit, node))
    after = edit.finish()
    return after, report("fuse_attention", graph, after, len(matched), len(matched))


def _paged(view: View, edit: Edit, node: Node) -> list[Node]:
    a = node.attrs
    if a.v_dim != a.head_dim:
        raise UnsupportedError(
            f"attention @{node.path}: values have {a.v_dim} columns a head and keys {a.head_dim}; "
            "the paged cache holds both at one width, so this model cannot be compiled"
        )
    heads = size_of(view.types[node.inputs[0]].shape[1])
    shared = {"layer": a.layer, "heads": heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim}
    flat = [
        edit.make("reshape", [name], [view.types[name]], {"shape": ("T", count * a.head_dim)}, like=node, stem=name)
        for name, count in zip(node.inputs, (heads, a.kv_heads, a.kv_heads), strict=True)
    ]
    none = {"rotary": 0, "style": "half", "qk_norm_eps": None}
    values, types = [f.out for f in flat], [f.type for f in flat]
    cache = edit.make("rope_cache", values, types, shared | none, like=node, stem=node.inputs[0])
    scaling = {"scale": a.scale, "window": a.window, "softcap": a.softcap}
    paged = edit.make("paged_attention", [cache.out], [cache.type], shared | scaling, like=node)
    shape = {"shape": node.type.shape}
    back = edit.make("reshape", [paged.out], [paged.type], shape, like=node, outputs=node.outputs)
    return [*flat, cache, paged, back]
