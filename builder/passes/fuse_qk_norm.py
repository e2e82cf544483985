"""RMS norms over each head of the queries and keys move into `rope_cache`.

Comes in: `rope_cache` whose query and key come from `rms_norm` over head_dim. Goes out: `rope_cache` with both norm
weights as its last inputs. Must not know: families. Runs after fuse_rotary: the kernel norms first and rotates then.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report_places


def fuse_qk_norm(graph: Graph) -> tuple[Graph, PassReport]:
    """Moves norms over heads into `rope_cache`, where queries and keys both have one, with one epsilon."""
    view, edit = View(graph), Edit(graph)
    matched, missed = [], []
    for node in graph:
        if node.op != "rope_cache" or node.attrs.qk_norm_eps is not None:
            continue
        query, key = (_head_norm(view, name) for name in node.inputs[:2])
        if query and key and query.attrs.eps == key.attrs.eps:
            edit.swap(node, *_norming(view, edit, node, query, key))
            matched.append(node.path)
        elif query or key:
            missed.append(node.path)
    after = edit.finish()
    return after, report_places("fuse_qk_norm", graph, after, matched, missed)


def _head_norm(view: View, flat: str) -> Node | None:
    """The norm over head_dim behind a [T, heads * head_dim] value, or None."""
    reshape = view.producer(flat, "reshape")
    norm = view.producer(reshape.inputs[0], "rms_norm") if reshape else None
    if norm is None or norm.attrs.residual or norm.types[0].rank != 3:
        return None
    return norm


def _norming(view: View, edit: Edit, node: Node, query: Node, key: Node) -> list[Node]:
    flat = [
        edit.make("reshape", [n.inputs[0]], [n.types[0]], {"shape": view.types[name].shape}, like=node, stem=name)
        for n, name in zip((query, key), node.inputs[:2], strict=True)
    ]
    inputs = [flat[0].out, flat[1].out, *node.inputs[2:], query.inputs[1], key.inputs[1]]
    types = [flat[0].type, flat[1].type, *(view.types[name] for name in inputs[2:])]
    attrs = vars(node.attrs) | {"qk_norm_eps": query.attrs.eps}
    return [*flat, edit.make("rope_cache", inputs, types, attrs, like=node, outputs=node.outputs)]
