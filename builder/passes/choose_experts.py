"""Experts that are computed for all tokens, most of them of rows that are zero, are computed for those that chose them.

Comes in: two `grouped_linear` in which every token goes to every expert, its row times scores that are zero but for the
k best, and the sum over experts. Goes out: the same two for the k experts that a token chose, combined. Must not know:
families, where the scores come from.

Nothing is lost where an expert makes zero of zero: it has no bias, and its formula is zero there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.operators import ALL
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.plugins.pointwise import evaluate
from llmc.plugins.pointwise.functions import ELEMENTWISE, FUNCTIONS


@dataclass(frozen=True)
class _Scores:
    """Scores [T,E] that are zero but where `index` [T,k] says: there `chain`, elementwise nodes, makes them of `source`
    [T,k]. The chain's nodes have one input that is no number; the first in it comes last in the graph.
    """

    index: str
    source: str
    chain: tuple[Node, ...]


def choose_experts(graph: Graph) -> tuple[Graph, PassReport]:
    """Computes experts for the tokens that chose them, where it was for all tokens, those of score zero included."""
    view, edit = View(graph), Edit(graph)
    ones: dict[int, Node] = {}
    matched, missed = [], []
    for first in graph:
        if first.op != "grouped_linear" or not _is_everyone(view, first.inputs[1]):
            continue
        second = view.only_user(first.out)
        if second is None or second.op != "grouped_linear" or not _is_everyone(view, second.inputs[1]):
            continue  # the second of two, or one whose formula stands apart
        total = _sum(view, second)
        parts = _scaled(view, first.inputs[0])
        if total is None or parts is None or not (_keeps_zero(first) and _keeps_zero(second)):
            missed.append(first.path)
            continue
        _rewrite(view, edit, (first, second, total), *parts, ones)
        matched.append(first.path)
    after = edit.finish()
    return after, report_places("choose_experts", graph, after, matched, missed)


def _is_everyone(view: View, index: str) -> bool:
    """Whether an index [T,E] names all experts, in order."""
    node = view.producers[index]
    if node.op != "broadcast":
        return False
    source = view.producers[node.inputs[0]]
    source = view.producers[source.inputs[0]] if source.op == "reshape" else source
    return source.op == "const" and list(source.attrs.values) == list(range(size_of(node.type.shape[-1])))


def _keeps_zero(node: Node) -> bool:
    """Whether the experts make zero of rows that are zero."""
    zero = np.zeros(1)
    return not node.attrs.bias and not evaluate(node.attrs.expr, [zero, zero][: 1 + node.attrs.gated]).any()


def _sum(view: View, second: Node) -> Node | None:
    """The sum [T,N,1] over the experts of a value [T,E,N] that nothing else reads."""
    turned = view.only_user(second.out)
    if turned is None or turned.op != "transpose" or tuple(turned.attrs.perm) != (0, 2, 1):
        return None
    total = view.only_user(turned.out)
    summed = total is not None and total.op == "reduce" and total.attrs.kind == "sum" and total.attrs.axis in (-1, 2)
    return total if summed else None


def _scaled(view: View, rows: str) -> tuple[str, _Scores] | None:
    """Rows [T,1,K] and scores of which rows [T,E,K] are the products."""
    node = view.producer(rows, "mul")
    if node is None:
        return None
    for row, column in (node.inputs, node.inputs[::-1]):
        flat = view.producer(column, "reshape")
        if flat is None or any(view.types[name].rank != 3 for name in (row, column)):
            continue
        if view.types[row].shape[1] != 1 or view.types[column].shape[2] != 1:
            continue
        if view.types[flat.inputs[0]].shape == node.type.shape[:2]:
            scores = _scores(view, flat.inputs[0])
            return None if scores is None else (row, scores)
    return None


def _scores(view: View, value: str) -> _Scores | None:
    """What a value [T,E] is, where it is zero but for chosen entries."""
    chain = []
    node = view.producers[value]
    while node.op in ELEMENTWISE:
        wide = [name for name in node.inputs if view.scalar(name) is None]
        if len(wide) != 1:
            return None
        chain.append(node)
        node = view.producers[wide[0]]
    if node.op != "scatter":
        return None
    base, index, source = node.inputs
    filled = view.producer(base, "broadcast")
    number = None if filled is None else _number(view, filled.inputs[0])
    if number is None or view.producer(index, "topk") is None or view.types[source].shape != view.types[index].shape:
        return None
    for step in reversed(chain):
        given = [view.scalar(name) for name in step.inputs]
        number = float(FUNCTIONS[step.op](*(np.float64(number if n is None else n) for n in given)))
    return _Scores(index, source, tuple(chain)) if number == 0 else None


def _number(view: View, value: str) -> float | None:
    node = view.producers[value]
    return view.scalar(node.inputs[0] if node.op == "reshape" else value)


def _rewrite(view: View, edit: Edit, nodes: tuple[Node, Node, Node], row: str, scores: _Scores,
             ones: dict[int, Node]) -> None:  # fmt: skip
    """The two products and their sum for chosen experts. `ones`: what combines results that are weighted already."""
    first, second, total = nodes
    chosen = view.types[scores.index]
    made: list[Node] = []

    def make(op: str, inputs: tuple[str, ...], types: tuple[TensorType, ...], like: Node, **attrs: object) -> Node:
        made.append(edit.make(op, inputs, types, attrs, like=like))
        return made[-1]

    name, kind = scores.source, view.types[scores.source]
    for step in reversed(scores.chain):
        inputs = tuple(i if view.scalar(i) is not None else name for i in step.inputs)
        types = tuple(view.types[i] if view.scalar(i) is not None else kind for i in step.inputs)
        name, kind = (node := make(step.op, inputs, types, step, **vars(step.attrs))).out, node.type
    column = make("reshape", (name,), (kind,), first, shape=(*chosen.shape, 1))
    rows = make("mul", (row, column.out), (view.types[row], column.type), first)
    k = size_of(chosen.shape[-1])
    if k not in ones:
        values = ALL["const"].attrs(values=(1.0,))
        one = Node("const", (), values, (edit.fresh("one"),), (TensorType("f32", (1, 1)),), "")
        ones[k] = edit.make("broadcast", [one.out], [one.type], {"shape": chosen.shape}, like=first, stem="ones")
        edit.before(first, one, ones[k])
    weights = [view.types[node.inputs[2]] for node in (first, second)]
    inputs, types = (rows.out, scores.index, first.inputs[2]), (rows.type, chosen, weights[0])
    inner = make("grouped_linear", inputs, types, first, **vars(first.attrs))
    inputs, types = (inner.out, scores.index, second.inputs[2]), (inner.type, chosen, weights[1])
    attrs = vars(second.attrs) | {"combine": True}
    outer = make("grouped_linear", (*inputs, ones[k].out), (*types, ones[k].type), second, **attrs)
    back = edit.make("reshape", [outer.out], [outer.type], {"shape": total.type.shape}, like=total,
                     outputs=total.outputs)  # fmt: skip
    edit.swap(total, *made, back)
