"""A linear whose output is only ever cut becomes one linear for each cut, with the rows of the weight that it needs.

Comes in: packed projections: pieces side by side (Phi3's qkv_proj and gate_up_proj, GPT-2's c_attn), or queries, keys
and values interleaved by head or by group of heads, as [T, heads, 3, D], [T, groups, group + 2, D] and their like. Goes
out: separate linears whose columns are plain heads, so that rotation, attention and sharding see them; the merge passes
join them again. Must not know: the layouts that exist; which rows a cut needs follows from the views before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.cut import picked


def split_packed(graph: Graph) -> tuple[Graph, PassReport]:
    """Splits each linear that only cuts read; what a cut still holds together (keys and values) is split in turn."""
    after, matched = graph, list[str]()
    while True:
        after, found = _split(after)
        if not found:
            return after, report_places("split_packed", graph, after, matched)
        matched += found


def _split(graph: Graph) -> tuple[Graph, list[str]]:
    view, edit = View(graph), Edit(graph)
    matched = []
    for node in graph:
        if node.op != "linear" or node.out in graph.outputs:
            continue
        if any(weight_recipe(view, name) is None for name in node.inputs[1:]):
            continue
        for piece in (pieces := _pieces(view, node)):
            columns = _columns(view, node, piece)
            edit.swap(piece, *_own_linear(view, edit, node, piece, columns))
        matched += [node.path] * bool(pieces)
    return edit.finish(), matched


def _pieces(view: View, linear: Node) -> list[Node]:
    """The nodes that end the views behind each cut; none where the linear holds only one thing."""
    stem = linear
    while (user := view.only_user(stem.out)) and _renames(user):
        stem = user
    cuts = view.users[stem.out]
    if stem.out in view.graph.outputs or not all(
        c.op == "slice" and c.attrs.axis not in (0, -c.type.rank) for c in cuts
    ):
        return []
    if len({(c.attrs.axis % c.type.rank, c.attrs.start, c.attrs.stop, c.attrs.step) for c in cuts}) < 2:
        return []
    if not (stem is linear and all(c.attrs.step == 1 for c in cuts)) and not _apart(view, cuts):
        return []
    return [_end(view, cut) for cut in cuts]


def _renames(node: Node) -> bool:
    """Whether the node gives a token's columns other axes or another order, and leaves the tokens in front."""
    if node.op == "reshape":
        return isinstance(node.type.shape[0], str)
    return node.op == "transpose" and node.attrs.perm[0] == 0


def _apart(view: View, cuts: Sequence[Node]) -> bool:
    """Whether cuts of heads go different ways: into different operands of attention. The halves that a rotation turns
    are cuts of one head and meet again.
    """
    roles = [_roles(view, cut) for cut in cuts]
    return all(roles) and all(a.isdisjoint(b) for a, b in itertools.combinations(roles, 2))


def _roles(view: View, node: Node) -> set[tuple[str, int]]:
    """(attention, operand) of every operand that depends on the node before a linear or an attention computes."""
    found, seen, wanted = set(), set(), [node.out]
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for user in view.users[name]:
            if user.op == "attention":
                found |= {(user.out, i) for i, operand in enumerate(user.inputs) if operand == name}
            elif user.op != "linear":
                wanted += user.outputs
    return found


def _end(view: View, cut: Node) -> Node:
    """The last of the views behind a cut that have one reader, without further cuts."""
    while (user := view.only_user(cut.out)) and _renames(user):
        cut = user
    return cut


def _columns(view: View, linear: Node, end: Node) -> np.ndarray:
    """Which of the linear's columns each element of a token's part of `end` is."""
    if end is linear:
        return np.arange(size_of(linear.type.shape[1]))
    source = view.producers[end.inputs[0]]
    before = _columns(view, linear, source).reshape([1, *map(size_of, source.type.shape[1:])])
    if end.op == "reshape":
        return before.reshape(list(map(size_of, end.type.shape[1:])))
    if end.op == "transpose":
        return before.transpose(end.attrs.perm)[0]
    index: list[slice] = [slice(None)] * before.ndim
    index[end.attrs.axis] = slice(end.attrs.start, end.attrs.stop, end.attrs.step)
    return before[tuple(index)][0]


def _own_linear(view: View, edit: Edit, linear: Node, end: Node, columns: np.ndarray) -> list[Node]:
    """The linear that computes one piece: weight, scales, zero points and bias all have outputs as their first axis."""
    rows = columns.reshape(-1).tolist()
    inputs, types = [linear.inputs[0]], [view.types[linear.inputs[0]]]
    for name in linear.inputs[1:]:
        recipe, kind = weight_recipe(view, name), view.types[name]
        assert recipe is not None
        weight = edit.param(picked(recipe, rows), TensorType(kind.dtype, (len(rows), *kind.shape[1:])), linear)
        inputs.append(weight.out)
        types.append(weight.type)
    attrs = vars(linear.attrs)
    if end.type.shape == (linear.type.shape[0], len(rows)):
        return [edit.make("linear", inputs, types, attrs, like=linear, outputs=end.outputs)]
    made = edit.make("linear", inputs, types, attrs, like=linear, stem=end.out)
    view_attrs = {"shape": end.type.shape}
    return [made, edit.make("reshape", [made.out], [made.type], view_attrs, like=end, outputs=end.outputs)]
