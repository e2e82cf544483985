"""A linear whose output is only ever cut on its last axis becomes one linear for each cut, with sliced weights.

Comes in: packed projections (Phi3's qkv_proj and gate_up_proj, GPT-2's c_attn). Goes out: separate linears, so that
sharding sees heads and halves; the merge passes join them again. Must not know: what the pieces mean.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.recipe import sliced


def split_packed(graph: Graph) -> tuple[Graph, PassReport]:
    """Splits each linear with two or more readers, all of which are unit-step slices of its last axis."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for node in graph:
        if node.op != "linear" or node.out in graph.outputs:
            continue
        cuts = view.users[node.out]
        if len({(c.attrs.start, c.attrs.stop) for c in cuts if is_last_axis_slice(c)}) < 2:
            continue
        recipes = [weight_recipe(view, w) for w in node.inputs[1:]]
        if not all(is_last_axis_slice(c) for c in cuts) or None in recipes:
            continue
        for cut in cuts:
            edit.swap(cut, _piece(view, edit, node, cut))
        matched += 1
    after = edit.finish()
    return after, report("split_packed", graph, after, matched)


def is_last_axis_slice(node: Node) -> bool:
    """Whether the node is a slice of the last axis with step 1."""
    return node.op == "slice" and node.attrs.axis in (-1, node.types[0].rank - 1) and node.attrs.step == 1


def _piece(view: View, edit: Edit, node: Node, cut: Node) -> Node:
    """The linear that computes one cut: weight, FP8 scale and bias all have the outputs as their first axis."""
    start, stop = cut.attrs.start, cut.attrs.stop
    inputs, types = [node.inputs[0]], [view.types[node.inputs[0]]]
    for name in node.inputs[1:]:
        recipe, kind = weight_recipe(view, name), view.types[name]
        assert recipe is not None
        piece = TensorType(kind.dtype, (stop - start, *kind.shape[1:]))
        weight = edit.param(sliced(recipe, 0, start, stop), piece, node)
        inputs.append(weight.out)
        types.append(weight.type)
    attrs = vars(node.attrs)
    return edit.make("linear", inputs, types, attrs, like=node, outputs=cut.outputs)
