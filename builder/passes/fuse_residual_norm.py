"""An addition whose sum is normed becomes one norm with a residual input and two outputs: the sum and its norm.

Comes in: `add` + `rms_norm` or `layer_norm`. Goes out: the norm with `residual=True`. Must not know: layers.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, View, report_places


def fuse_residual_norm(graph: Graph) -> tuple[Graph, PassReport]:
    """Fuses each addition of two whole values into the first norm that reads the sum."""
    view, edit = View(graph), Edit(graph)
    taken: set[str] = set()
    matched = []
    for node in graph:
        if node.op not in ("rms_norm", "layer_norm") or node.attrs.residual:
            continue
        add = view.producer(node.inputs[0], "add")
        if add is None or add.out in taken or any(view.types[name] != add.type for name in add.inputs):
            continue
        taken.add(add.out)
        matched.append(node.path)
        residual, branch = add.inputs  # either order gives the same sum; models write residual + branch
        inputs = [branch, *node.inputs[1:], residual]
        types, attrs = [view.types[n] for n in inputs], vars(node.attrs) | {"residual": True}
        norm = edit.make(node.op, inputs, types, attrs, like=node, outputs=(edit.fresh(add.out), node.out))
        edit.rename(add.out, norm.outputs[0])
        edit.swap(node, norm)
    after = edit.finish()
    return after, report_places("fuse_residual_norm", graph, after, matched, follows=True)
