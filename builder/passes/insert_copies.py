"""Movement of data becomes `copy`, where it cannot be a view or where a reader refuses the view.

Comes in: a graph whose arithmetic is fused. Goes out: the same with `copy` nodes; what remains of `slice` and `reshape`
is a view. Must not know: kernels, beyond which inputs they can read with a row stride.
"""

from __future__ import annotations

import dataclasses

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.builder.passes.views import is_view

_MOVES = ("transpose", "slice", "concat", "broadcast")

#: Operator -> how many of its first inputs may be columns of a wider value; every other reader wants them side by side.
STRIDED_INPUTS = {
    "linear": 1,
    "quantize": 1,
    "grouped_linear": 1,
    "rope_cache": 3,
    "latent_cache": 5,
    "head_linear": 1,
    "rms_norm": 1,
    "mean_squares": 2,
    "pointwise": 1 << 16,
    "rowwise": 1 << 16,
    "causal_conv": 1,
    "ssd_scan": 4,
    "selective_scan": 4,
    "gated_delta": 5,
}


def insert_copies(graph: Graph) -> tuple[Graph, PassReport]:
    """Replaces moves by copies, and puts a copy behind each sliced view that is returned or read without strides."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for node in graph:
        if node.op in _MOVES and (not is_view(node) or _refused(view, node)):
            attrs = {"kind": node.op} | {f.name: getattr(node.attrs, f.name) for f in dataclasses.fields(node.attrs)}
            types = [view.types[name] for name in node.inputs]
            edit.swap(node, edit.make("copy", node.inputs, types, attrs, like=node, outputs=node.outputs))
            matched += 1
    after = edit.finish()
    return after, report("insert_copies", graph, after, matched)


def _refused(view: View, node: Node) -> bool:
    """Whether a sliced view has a reader that cannot follow its row stride."""
    if node.op != "slice":
        return False
    if node.out in view.graph.outputs or view.producers[node.inputs[0]].op == "slice":
        return True
    return any(node.out in user.inputs[STRIDED_INPUTS.get(user.op, 0) :] for user in view.users[node.out])
