"""What no pattern claimed: a tree of elementwise nodes becomes one `pointwise`.

Comes in: primitives between plug-in operators. Goes out: `pointwise` with an expression. Must not know: what is
computed; an unknown formula costs speed, never support.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.plugins.pointwise.functions import ELEMENTWISE


def fuse_pointwise(graph: Graph) -> tuple[Graph, PassReport]:
    """Each elementwise node that its only reader does not absorb becomes the root of a `pointwise`."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for node in graph:
        if _fits(view, node) and not _absorbed(view, node):
            edit.swap(node, _pointwise(view, edit, node))
            matched += 1
    after = edit.finish()
    return after, report("fuse_pointwise", graph, after, matched)


def _absorbed(view: View, node: Node) -> bool:
    """Whether its only reader computes the node on the way: elementwise, of its size, reading it once."""
    user = view.only_user(node.out)
    return bool(user and _fits(view, user) and user.type == node.type and user.inputs.count(node.out) == 1)


def _fits(view: View, node: Node) -> bool:
    """Whether `pointwise` can compute the node: in f32, to which integers are turned as they are read."""
    if node.op == "cast":
        return node.type.dtype == "f32" and view.types[node.inputs[0]].dtype in ("f32", "i32")
    return node.op in ELEMENTWISE and node.type.dtype == "f32"


def _pointwise(view: View, edit: Edit, root: Node) -> Node:
    inputs: dict[str, str] = {}

    def text(value: str) -> str:
        node = view.producers[value]
        number = view.scalar(value)
        if number is not None:
            return repr(number)
        if node is root or (_fits(view, node) and _absorbed(view, node)):
            if node.op == "cast":
                return text(node.inputs[0])
            return f"{node.op}({', '.join(text(name) for name in node.inputs)})"
        return inputs.setdefault(value, f"i{len(inputs)}")

    expr = text(root.out)
    types = [view.types[name] for name in inputs]
    return edit.make("pointwise", list(inputs), types, {"expr": expr}, like=root, outputs=root.outputs)
