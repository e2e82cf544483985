"""Reshapes of reshapes become one reshape, and reshapes that change nothing disappear.

Comes in, goes out: any graph. Must not know: what is reshaped.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, View, report


def simplify_views(graph: Graph) -> tuple[Graph, PassReport]:
    """Removes reshapes that change nothing, and reshapes of reshapes."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for node in graph:
        if node.op != "reshape":
            continue
        source = node.inputs[0]
        while view.producers[source].op == "reshape":
            source = view.producers[source].inputs[0]
        if view.types[source] == node.type:
            edit.rename(node.out, source)
            matched += 1
        elif source != node.inputs[0]:
            edit.swap(node, node.replace(inputs=(source,)))
            matched += 1
    after = edit.finish()
    return after, report("simplify_views", graph, after, matched)
