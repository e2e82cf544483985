"""The traced graph without its batch axis, transposes, expansions and duplicates: what all further passes start from.

Comes in: a graph as traced: ids [1,T], heads before tokens. Goes out: the same computation where tokens come first:
ids [T], hidden states [T,H], q [T,heads,head_dim], logits [S,V]. Must not know: families, what patterns come later.

Every node is emitted anew from values whose axes are tracked (`layout`), so most views cost nothing. What remains:
`reshape` between [T, heads * head_dim] and [T, heads, head_dim] and where a [T,R] table meets [T, heads, R]; reductions
over the last axis with keepdim; `transpose` and `broadcast` only where an operator needs elements in that order.
"""

from __future__ import annotations

from collections.abc import Callable

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, GraphError, Node
from llmc.builder.operators import ALL
from llmc.builder.passes.layout import Emitter, Lazy
from llmc.builder.passes.rewrite import report, tidy
from llmc.builder.primitives.logic import COMPARISONS, LOGICAL
from llmc.plugins.pointwise.functions import BINARY, UNARY

#: Terms of a sum of products that is written out.
_FEW = 8

Rule = Callable[[Emitter, Node, list[Lazy]], Lazy]


def canonicalize(graph: Graph) -> tuple[Graph, PassReport]:
    """Drops the batch axis and views that change nothing, and moves tokens first. A canonical graph stays as it is.

    Raises GraphError for an operator that tracing does not emit.
    """
    emitter = Emitter()
    values: dict[str, Lazy] = {}
    for node in graph:
        if node.op not in _RULES:
            raise GraphError(f"{node.op} %{', %'.join(node.outputs)}: canonicalize has no rule for this operator")
        emitter.source = node
        result = _RULES[node.op](emitter, node, [values[name] for name in node.inputs])
        if result.shape != node.type.shape:
            raise GraphError(f"{node.op} %{node.out}: {result.shape} stands for {node.type}")
        values[node.out] = result
    outputs = tuple(
        emitter.align(values[o], [i for i, d in enumerate(values[o].shape) if d != 1]) for o in graph.outputs
    )
    after = tidy(graph.with_nodes(emitter.nodes, outputs))
    views = sum(n.op in ("reshape", "transpose", "broadcast") for n in graph)
    left = sum(n.op in ("reshape", "transpose", "broadcast") for n in after)
    return after, report("canonicalize", graph, after, views - left)


def _source(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """Inputs lose their batch axis, one-element constants all axes; weights stay as they are, but axes of size 1 before
    the others only broadcast: nothing is laid out for their sake.
    """
    shape = node.type.shape
    if node.op == "param":
        name = e.add(node.op, (), node.attrs, node.type)
        first = next((i for i, d in enumerate(shape) if d != 1), len(shape) - 1)
        return Lazy(name, shape, tuple(i if i >= first else None for i in range(len(shape))))
    keep = list(range(len(shape)))
    if node.op == "input":
        keep = [i for i, d in enumerate(shape) if d != 1]
    elif node.op == "const" and len(node.attrs.values) == 1:
        keep = []
    name = e.add(node.op, (), node.attrs, TensorType(node.type.dtype, tuple(shape[i] for i in keep)))
    return e.laid(name, shape, keep)


def _unary(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    (x,) = inputs
    return Lazy(
        e.add(node.op, (x.name,), node.attrs, TensorType(node.type.dtype, e.types[x.name].shape)), x.shape, x.axes
    )


def _binary(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    shape = node.type.shape
    padded = [x.padded(len(shape)) for x in inputs]
    order = e.order(padded)
    return e.laid(e.emit(node.op, [e.align(x, order, full=False, trim=True) for x in padded]), shape, order)


def _reduce(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """Over the last stored axis, which stays as 1."""
    (x,) = inputs
    axis = node.attrs.axis % len(x.shape)
    order = [i for i in e.order([x], [axis]) if i != axis] + [axis]
    name = x.name if x.stored() == order and e.size(x, axis) == x.shape[axis] else e.align(x, order)
    if order.index(axis) != e.types[name].rank - 1:
        name = e.align(x, order)
    name = e.emit("reduce", [name], kind=node.attrs.kind, axis=-1, keepdim=True)
    reduced = e.laid(name, (*x.shape[:axis], 1, *x.shape[axis + 1 :]), order)
    if not node.attrs.keepdim and any(i > axis for i in order):  # it is stored after axes that follow it
        reduced = e.without(reduced, axis)
    return e.view(reduced, node.type.shape)


def _reshape(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    return e.view(inputs[0], node.type.shape)


def _transpose(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    (x,) = inputs
    return Lazy(x.name, node.type.shape, tuple(x.axes[i] for i in node.attrs.perm))


def _broadcast(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    padded = inputs[0].padded(len(node.type.shape))
    return Lazy(padded.name, node.type.shape, padded.axes)


def _slice(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    (x,) = inputs
    axis = node.attrs.axis % len(x.shape)
    stored = x.axes[axis]
    if stored is None or e.size(x, axis) != x.shape[axis]:  # repeated: any part is like the whole
        return Lazy(x.name, node.type.shape, x.axes)
    attrs = {"start": node.attrs.start, "stop": node.attrs.stop, "step": node.attrs.step}
    piece = Lazy(e.emit("slice", [x.name], axis=stored, **attrs), node.type.shape, x.axes)
    behind = any(a is not None and a < stored for a in x.axes[axis + 1 :])  # it is stored after axes that follow it
    return e.without(piece, axis) if node.type.shape[axis] == 1 and behind else piece


def _concat(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """Slices that follow each other in one value are one slice of it."""
    axis = node.attrs.axis % node.type.rank
    order = e.order(inputs, [axis])
    names = e.adjoining([e.align(x, order) for x in inputs], order.index(axis))
    joined = names[0] if len(names) == 1 else e.emit("concat", names, axis=order.index(axis))
    return e.laid(joined, node.type.shape, order)


def _matmul(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """An outer product (one term per sum) is a multiplication, and a product that mixes few values of each token a sum
    of such: there is no kernel for it. Other batch axes broadcast.
    """
    rank = node.type.rank
    a, b = (x.padded(rank) for x in inputs)
    few = a.shape[-1]
    if few == 1:
        return _binary(e, node.replace(op="mul"), [a, b])
    if isinstance(few, int) and few <= _FEW and "T" in a.shape[:-2] and "T" in b.shape[:-2]:
        return _sum_of_products(e, node, a, b, few)
    batch = sorted({i for x in (a, b) for i in x.stored() if i < rank - 2})
    order = [*batch, rank - 2, rank - 1]
    left, right = (e.align(x, order) for x in (a, b))
    return e.laid(e.emit("matmul", [left, right]), node.type.shape, order)


def _sum_of_products(e: Emitter, node: Node, a: Lazy, b: Lazy, terms: int) -> Lazy:
    rank = node.type.rank
    total: Lazy | None = None
    for k in range(terms):
        column, row = _entry(e, a, rank - 1, k), _entry(e, b, rank - 2, k)
        product = _binary(e, node.replace(op="mul"), [column, row])
        total = product if total is None else _binary(e, node.replace(op="add"), [total, product])
    assert total is not None
    return total


def _entry(e: Emitter, x: Lazy, axis: int, place: int) -> Lazy:
    """One entry of an axis, which stays as 1."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    stored = x.axes[axis]
    if stored is None or e.size(x, axis) != x.shape[axis]:
        return Lazy(x.name, shape, x.axes)
    return Lazy(e.emit("slice", [x.name], axis=stored, start=place, stop=place + 1, step=1), shape, x.axes)


def _as_traced(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """An operator whose inputs tracing has brought to [rows,columns] already."""
    return e.whole(e.emit(node.op, [e.exact(x) for x in inputs], **vars(node.attrs)))


def _norm(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """Over the last traced axis, which is brought to the last place where it is stored elsewhere."""
    x = inputs[0]
    last = len(x.shape) - 1
    order = [i for i in e.order([x], [last]) if i != last] + [last]
    name = x.name if x.stored() == order and e.types[x.name].rank == len(order) else e.align(x, order)
    name = e.emit(node.op, [name, *(e.exact(w) for w in inputs[1:])], **vars(node.attrs))
    return e.laid(name, x.shape, order)


def _choice(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """Over the last traced axis; what leads is the same for all inputs. A number that is put everywhere stays one."""
    last = len(node.type.shape) - 1
    tensors = [x for x in inputs if x.shape]
    order = [i for i in e.order(tensors, [last]) if i != last] + [last]
    names = [e.align(x, order) if x.shape else x.name for x in inputs]
    return e.laid(e.emit(node.op, names, **vars(node.attrs)), node.type.shape, order)


def _grouped_linear(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    return e.whole(e.emit("grouped_linear", [e.exact(x) for x in inputs], **vars(node.attrs)))


def _embedding(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    ids, table = inputs
    order = ids.stored()
    name = e.emit("embedding", [e.align(ids, order), e.exact(table)])
    return e.laid(name, node.type.shape, [*order, node.type.rank - 1])


def _select_rows(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    return e.whole(e.emit("select_rows", [e.exact(x) for x in inputs]))


def _attention(e: Emitter, node: Node, inputs: list[Lazy]) -> Lazy:
    """q [1,H,T,D], k and v [1,KH,T,D] as [T,H,D] and [T,KH,D]; the result [1,T,H,D] as [T,H,D]."""
    traced = len(inputs[0].shape) == 4
    names = [e.align(x, (2, 1, 3) if traced else (0, 1, 2)) for x in inputs[:3]] + [e.exact(x) for x in inputs[3:]]
    return e.laid(e.emit("attention", names, **vars(node.attrs)), node.type.shape, [1, 2, 3] if traced else [0, 1, 2])


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("input", "param", "const"), _source),
    **dict.fromkeys((*UNARY, "cast", "logical_not"), _unary),
    **dict.fromkeys((*BINARY, *COMPARISONS, *LOGICAL, "where"), _binary),
    **dict.fromkeys(("topk", "gather", "scatter"), _choice),
    "grouped_linear": _grouped_linear,
    "reduce": _reduce,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "concat": _concat,
    "matmul": _matmul,
    "linear": _as_traced,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "embedding": _embedding,
    "select_rows": _select_rows,
    "attention": _attention,
    **dict.fromkeys((name for name, operator in ALL.items() if operator.state_shape), _as_traced),
}
