"""Operators that any graph has a form of, in terms of a `GraphWriter`. Comes in: a `Node`, a writer. Goes out: values.
Must not know: whose graph is written, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llmc.artifacts.types import Dim
from llmc.builder.ir import Node
from llmc.builder.translation.writer import GraphWriter, Value


def with_unknown(shape: Iterable[Dim]) -> tuple[int, ...]:
    """A shape whose symbols are -1: sizes that are not known."""
    return tuple(-1 if isinstance(d, str) else d for d in shape)


def _rms_norm(e: GraphWriter[Value], node: Node) -> list[Value]:
    x, w, *residual = map(e.value, node.inputs)
    total = e.apply("add", x, *residual) if residual else x
    y = e.rms_normed(total, w, node.attrs.eps, node.types[-1].rank)
    return [total, y] if residual else [y]


def _layer_norm(e: GraphWriter[Value], node: Node) -> list[Value]:
    x, w, b, *residual = map(e.value, node.inputs)
    total = e.apply("add", x, *residual) if residual else x
    y = e.layer_normed(total, w, b, node.attrs.eps, node.types[-1].rank)
    return [total, y] if residual else [y]


def _all_reduce(e: GraphWriter[Value], node: Node) -> list[Value]:
    return [e.all_reduce(e.value(node.inputs[0]))]


def _embedding(e: GraphWriter[Value], node: Node) -> list[Value]:
    ids, table = map(e.value, node.inputs)
    rows = e.gather(table, ids)
    return [rows if e.types[node.inputs[1]].dtype == "f32" else e.cast(rows, "f32")]


def _select_rows(e: GraphWriter[Value], node: Node) -> list[Value]:
    return [e.gather(*map(e.value, node.inputs))]


def _pointwise(e: GraphWriter[Value], node: Node) -> list[Value]:
    return [e.formula(node.attrs.expr, [e.float32(name) for name in node.inputs], node.type.rank)]


def _copy(e: GraphWriter[Value], node: Node) -> list[Value]:
    a, x, own = node.attrs, e.value(node.inputs[0]), e.types[node.inputs[0]]
    match a.kind:
        case "transpose":
            return [e.transpose(x, a.perm)]
        case "slice":
            return [e.slice(x, a.axis, a.start, a.stop, a.step)]
        case "concat":
            return [e.concat([x, *map(e.value, node.inputs[1:])], a.axis % own.rank)]
        case "broadcast":
            return [e.broadcast(x, own.shape, a.shape)]
    raise ValueError(f"a copy of the kind {a.kind} has no form here")


def _reshape(e: GraphWriter[Value], node: Node) -> list[Value]:
    return [e.reshape(e.value(node.inputs[0]), with_unknown(node.attrs.shape))]


def _slice(e: GraphWriter[Value], node: Node) -> list[Value]:
    a = node.attrs
    return [e.slice(e.value(node.inputs[0]), a.axis, a.start, a.stop, a.step)]


#: Operator -> its translation, which raises ValueError for a form that the writer's graph has not.
TRANSLATIONS: dict[str, Callable[[GraphWriter[Any], Node], list[Any]]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "all_reduce": _all_reduce,
    "embedding": _embedding,
    "select_rows": _select_rows,
    "pointwise": _pointwise,
    "copy": _copy,
    "reshape": _reshape,
    "slice": _slice,
}
