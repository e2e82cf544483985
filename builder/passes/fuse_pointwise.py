"""What no pattern claimed: elementwise nodes that end in one become a `pointwise`.

Comes in: primitives between plug-in operators. Goes out: `pointwise` with an expression. Must not know: what is
computed; an unknown formula costs speed, never support.

A value that the same formula reads twice is written twice into it: the C++ compiler computes it once.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.plugins.pointwise.functions import ELEMENTWISE

#: The most functions of a value that is written more than once into a formula.
_REPEATED = 16


def fuse_pointwise(graph: Graph) -> tuple[Graph, PassReport]:
    """Each elementwise node that its readers do not absorb becomes the root of a `pointwise`."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    roots = _roots(view, graph)
    for node in graph:
        if roots.get(node.outputs[0]) is node:
            edit.swap(node, _pointwise(view, edit, node, roots))
            matched += 1
    after = edit.finish()
    return after, report("fuse_pointwise", graph, after, matched)


def _roots(view: View, graph: Graph) -> dict[str, Node]:
    """Elementwise value -> the node in whose formula it is computed: its own, or the one where all its readers are."""
    roots: dict[str, Node] = {}
    sizes = _sizes(view, graph)
    for node in reversed(list(graph)):
        if not _fits(view, node):
            continue
        users = view.users[node.out]
        ends = {id(end): end for end in (roots.get(user.outputs[0]) for user in users)}
        end = next(iter(ends.values())) if len(ends) == 1 and node.out not in graph.outputs else None
        reads = sum(user.inputs.count(node.out) for user in users)
        inside = end is not None and end.type == node.type and (reads == 1 or sizes[node.out] <= _REPEATED)
        roots[node.out] = end if inside and end is not None else node
    return roots


def _sizes(view: View, graph: Graph) -> dict[str, int]:
    """Elementwise value -> the functions that a formula for it alone would have."""
    sizes: dict[str, int] = {}
    for node in graph:
        if _fits(view, node):
            sizes[node.out] = 1 + sum(sizes.get(name, 0) for name in node.inputs)
    return sizes


def _fits(view: View, node: Node) -> bool:
    """Whether `pointwise` can compute the node: in f32, to which integers are turned as they are read."""
    if node.op == "cast":
        return node.type.dtype == "f32" and view.types[node.inputs[0]].dtype in ("f32", "i32")
    return node.op in ELEMENTWISE and node.type.dtype == "f32"


def _pointwise(view: View, edit: Edit, root: Node, roots: Mapping[str, Node]) -> Node:
    inputs: dict[str, str] = {}

    def text(value: str) -> str:
        node = view.producers[value]
        number = view.scalar(value)
        if number is not None:
            return repr(number)
        if roots.get(value) is root:
            if node.op == "cast":
                return text(node.inputs[0])
            return f"{node.op}({', '.join(text(name) for name in node.inputs)})"
        return inputs.setdefault(value, f"i{len(inputs)}")

    expr = text(root.out)
    types = [view.types[name] for name in inputs]
    return edit.make("pointwise", list(inputs), types, {"expr": expr}, like=root, outputs=root.outputs)
