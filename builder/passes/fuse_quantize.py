"""Rounding to FP8 joins the norm before it, where nothing else reads the norm: what is rounded is never written.

Comes in: `rms_norm` or `layer_norm`, then `quantize`. Goes out: the norm with `quantize`, whose last outputs are the
numbers and their scales. Must not know: layers.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, View, report_places

_NORMS = ("rms_norm", "layer_norm")


def fuse_quantize(graph: Graph) -> tuple[Graph, PassReport]:
    """Lets a norm round its result to FP8 where only that is read."""
    view, edit = View(graph), Edit(graph)
    matched = []
    for node in graph:
        if node.op != "quantize":
            continue
        norm = view.producer(node.inputs[0], *_NORMS)
        if norm is None or view.only_user(node.inputs[0]) is None or node.inputs[0] != norm.outputs[-1]:
            continue  # others read it too, or it is the sum that a norm with a residual returns
        attrs = vars(norm.attrs) | {"quantize": "token" if node.attrs.scale is None else node.attrs.scale}
        types = [view.types[name] for name in norm.inputs]
        outputs = (*norm.outputs[:-1], *node.outputs)
        edit.swap(norm, edit.make(norm.op, norm.inputs, types, attrs, like=norm, outputs=outputs))
        edit.swap(node)
        matched.append(norm.path)
    after = edit.finish()
    other = [node.path for node in graph if node.op in _NORMS and _read_as_it_is(view, node.outputs[-1])]
    return after, report_places("fuse_quantize", graph, after, matched, other=other, follows=True)


def _read_as_it_is(view: View, value: str) -> bool:
    """Whether a product with E4M3 weights does not round the value: the calibration kept it."""
    return any(
        node.op in ("linear", "grouped_linear")
        and node.inputs[0] == value
        and view.types[node.inputs[1 if node.op == "linear" else 2]].dtype == "f8e4m3"
        for node in view.users[value]
    )
