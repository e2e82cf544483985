"""llmc's operators in ONNX's: a translation each. Comes in: a `Node`, an `Emitter`. Goes out: the results' names. Must
not know: files, weights' values.

What reads or writes the paged cache, and the sum over ranks, are operators of the domain `llmc` (reference.py has what
they compute); everything else is made of standard operators of opset 21.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from llmc.builder.interchange import products, row_programs
from llmc.builder.interchange.elementwise import formula
from llmc.builder.interchange.emitter import DOMAIN, Emitter
from llmc.builder.ir import Node

DOMAIN_VERSION, OPSET = 1, 21
#: Arrays of a step that the cache's operators take, in this order, behind the layer's keys and values.
STEP_INPUTS = ("query_start", "context_len", "block_tables")
#: Operators of the cache -> their name in the domain, and whether they write it.
CACHE = {
    "rope_cache": ("RopeCache", True),
    "paged_attention": ("PagedAttention", False),
    "latent_cache": ("LatentCache", True),
    "latent_attention": ("LatentAttention", False),
}


def cache_names(layer: int, version: int = 0) -> tuple[str, str]:
    """A layer's keys and values, before and after the step has written them."""
    return (f"keys.{layer}{'.out' * version}", f"values.{layer}{'.out' * version}")


def cache_operator(e: Emitter, node: Node) -> list[str]:
    """Results of the node; a writer's keys and values behind the step have the names of `cache_names(layer, 1)`."""
    name, writes = CACHE[node.op]
    layer = node.attrs.layer
    inputs = (*node.inputs, *cache_names(layer, 0 if writes else 1), *STEP_INPUTS)
    count = len(node.outputs)
    e.op(name, *inputs, domain=DOMAIN, results=count + 2 * writes, **_attributes(node.attrs))
    if writes:
        e.nodes[-1].output[count:] = cache_names(layer, 1)
    return e.outputs(count)


def _attributes(attrs: Any) -> dict[str, Any]:
    """A dataclass as ONNX attributes; None is left out, the scales of keys and of values are two lists."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(attrs):
        value = getattr(attrs, field.name)
        if field.name == "kv_scales" and value is not None:
            found["key_scales"], found["value_scales"] = map(list, value)
        elif value is not None:
            found[field.name] = int(value) if isinstance(value, bool) else value
    return found


def _embedding(e: Emitter, node: Node) -> list[str]:
    rows = e.op("Gather", node.inputs[1], node.inputs[0])
    return [rows if e.types[node.inputs[1]].dtype == "f32" else e.cast(rows, "f32")]


def _select_rows(e: Emitter, node: Node) -> list[str]:
    return [e.op("Gather", *node.inputs)]


def _rms_norm(e: Emitter, node: Node) -> list[str]:
    x, w, *residual = node.inputs
    total = e.op("Add", x, *residual) if residual else x
    square = e.op("ReduceMean", e.op("Mul", total, total), e.integers([-1]))
    root = e.op("Sqrt", e.op("Add", square, e.constant(node.attrs.eps, "f32")))
    y = e.op("Mul", e.op("Div", total, root), w)
    return [total, y] if residual else [y]


def _layer_norm(e: Emitter, node: Node) -> list[str]:
    x, w, b, *residual = node.inputs
    total = e.op("Add", x, *residual) if residual else x
    y = e.op("LayerNormalization", total, w, b, epsilon=node.attrs.eps)
    return [total, y] if residual else [y]


def _all_reduce(e: Emitter, node: Node) -> list[str]:
    return [products.all_reduce(e, node.inputs[0])]


def _mean_squares(e: Emitter, node: Node) -> list[str]:
    sums = [e.op("ReduceSumSquare", x, e.integers([1]), keepdims=1) for x in node.inputs]
    widths = [e.constant(float(width), "f32") for width in node.attrs.widths]
    means = [e.op("Div", total, width) for total, width in zip(sums, widths, strict=True)]
    return [e.op("Concat", *means, axis=1)]


def _pointwise(e: Emitter, node: Node) -> list[str]:
    return [formula(e, node.attrs.expr, [e.float32(name) for name in node.inputs])]


def _reduce(e: Emitter, node: Node) -> list[str]:
    kind = {"mean": "ReduceMean", "sum": "ReduceSum", "max": "ReduceMax"}[node.attrs.kind]
    return [e.op(kind, node.inputs[0], e.integers([-1]), keepdims=int(node.attrs.keepdim))]


def _copy(e: Emitter, node: Node) -> list[str]:
    a, x = node.attrs, node.inputs[0]
    match a.kind:
        case "transpose":
            return [e.op("Transpose", x, perm=list(a.perm))]
        case "slice":
            return [e.slice(x, a.axis, a.start, a.stop, a.step)]
        case "concat":
            return [e.op("Concat", *node.inputs, axis=a.axis)]
    own = (1,) * (len(a.shape) - e.types[x].rank) + e.types[x].shape
    # An axis that x has already stays as it is: 1 asks for nothing in an Expand.
    sizes = [1 if d == o else d for d, o in zip(a.shape, own, strict=True)]
    counts = {"T": "ids", "S": "rows"}
    parts = [e.op("Shape", counts[d]) if isinstance(d, str) else e.integers([d]) for d in sizes]
    return [e.op("Expand", x, e.op("Concat", *parts, axis=0))]


def _reshape(e: Emitter, node: Node) -> list[str]:
    return [e.reshape(node.inputs[0], node.attrs.shape)]


def _slice(e: Emitter, node: Node) -> list[str]:
    a = node.attrs
    return [e.slice(node.inputs[0], a.axis, a.start, a.stop, a.step)]


#: Operator -> its translation, which raises ValueError for a form that it does not have.
TRANSLATIONS: dict[str, Callable[[Emitter, Node], list[str]]] = {
    **dict.fromkeys(CACHE, cache_operator),
    "linear": products.linear,
    "head_linear": products.head_linear,
    "grouped_linear": products.grouped_linear,
    "all_reduce": _all_reduce,
    "mean_squares": _mean_squares,
    "rowwise": row_programs.rowwise,
    "embedding": _embedding,
    "select_rows": _select_rows,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "pointwise": _pointwise,
    "reduce": _reduce,
    "copy": _copy,
    "reshape": _reshape,
    "slice": _slice,
}
