"""Activations and gated products move into the linear layer that feeds them.

Comes in: `act(linear)` and, after merge_gate_up, `act(gate) * up` over the two halves of one linear. Goes out: linear
with an epilogue. Must not know: families.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.merge_linears import gated_product, of_whole_rows
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.plugins.linear import ACTIVATIONS


def fuse_activation(graph: Graph) -> tuple[Graph, PassReport]:
    """Moves activations and gated products into the linear that nothing else reads.

    A gated product that others like it fused, but that could not be, stops the build.
    """
    view, edit = View(graph), Edit(graph)
    matched: list[str] = []
    missed: list[str] = []
    others: list[str] = []  # a gate that no epilogue computes
    for node in graph:
        product = gated_product(view, node)
        if product:
            linear = _halves(view, *product[:2])
            if linear:
                edit.swap(node, _with_epilogue(view, edit, node, linear, f"{product[2].op}_gate"))
                matched.append(node.path)
            else:
                (others if of_whole_rows(view, product[0]) else missed).append(node.path)
        elif node.op in ACTIVATIONS:
            source = view.producer(node.inputs[0], "linear")
            if source and view.only_user(source.out) and _open(source):
                edit.swap(node, _with_epilogue(view, edit, node, source, node.op))
                matched.append(node.path)
    after = edit.finish()
    return after, report_places("fuse_activation", graph, after, matched, missed, others)


def _open(linear: Node) -> bool:
    """Whether the linear's result is final, and nothing follows it yet."""
    return linear.attrs.epilogue == "none" and not linear.attrs.all_reduce


def _halves(view: View, gate: str, up: str) -> Node | None:
    """The linear whose first half is `gate` and second half `up`, read by nobody else."""
    cuts = [view.producer(name, "slice") for name in (gate, up)]
    if not all(cuts) or cuts[0].inputs != cuts[1].inputs or len(view.users[cuts[0].inputs[0]]) != 2:  # type: ignore[union-attr]
        return None
    linear = view.producer(cuts[0].inputs[0], "linear")  # type: ignore[union-attr]
    if linear is None or not _open(linear) or not all(view.only_user(name) for name in (gate, up)):
        return None
    half = size_of(linear.type.shape[1]) // 2
    kept = [(c.attrs.start, c.attrs.stop, c.attrs.step) for c in cuts if c]
    return linear if kept == [(0, half, 1), (half, 2 * half, 1)] else None


def _with_epilogue(view: View, edit: Edit, node: Node, linear: Node, epilogue: str) -> Node:
    """The linear in the place of `node`, whose output it takes over; its own path stays."""
    types = [view.types[name] for name in linear.inputs]
    attrs = vars(linear.attrs) | {"epilogue": epilogue}
    return edit.make("linear", linear.inputs, types, attrs, like=linear, outputs=node.outputs)
