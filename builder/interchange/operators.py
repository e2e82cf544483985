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
from llmc.builder.interchange.emitter import DOMAIN, Emitter
from llmc.builder.ir import Node
from llmc.builder.translation import operators as common

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


def _mean_squares(e: Emitter, node: Node) -> list[str]:
    sums = [e.op("ReduceSumSquare", x, e.integers([1]), keepdims=1) for x in node.inputs]
    widths = [e.constant(float(width), "f32") for width in node.attrs.widths]
    means = [e.op("Div", total, width) for total, width in zip(sums, widths, strict=True)]
    return [e.op("Concat", *means, axis=1)]


def _reduce(e: Emitter, node: Node) -> list[str]:
    kind = {"mean": "ReduceMean", "sum": "ReduceSum", "max": "ReduceMax"}[node.attrs.kind]
    return [e.op(kind, node.inputs[0], e.integers([-1]), keepdims=int(node.attrs.keepdim))]


#: Operator -> its translation, which raises ValueError for a form that it does not have.
TRANSLATIONS: dict[str, Callable[[Emitter, Node], list[str]]] = {
    **common.TRANSLATIONS,
    **dict.fromkeys(CACHE, cache_operator),
    "linear": products.linear,
    "head_linear": products.head_linear,
    "grouped_linear": products.grouped_linear,
    "mean_squares": _mean_squares,
    "rowwise": row_programs.rowwise,
    "reduce": _reduce,
}
