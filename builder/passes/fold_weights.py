"""What is computed from weights alone moves into their recipes: done once, by the build, instead of in every step.

Comes in, goes out: any graph. Must not know: what the weights are for.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.builder.passes.weight import weight_recipe


def fold_weights(graph: Graph) -> tuple[Graph, PassReport]:
    """Replaces weight + constant, weight * constant, and transposes and stacks of weights, by weights of their own."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for node in graph:
        if node.op not in ("add", "mul", "transpose", "reshape"):
            continue
        recipe = weight_recipe(view, node.out)
        if recipe is not None:
            edit.rename(node.out, edit.param(recipe, node.type, node).out)
            matched += 1
    after = edit.finish()
    return after, report("fold_weights", graph, after, matched)
