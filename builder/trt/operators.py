"""llmc's operators as TensorRT layers, but those of the cache. Comes in: a `Node`, an `Emitter`. Goes out: tensors.
Must not know: engines, files.

FP8 is Q/DQ with constant scales, which is all that TensorRT takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.builder.ir import Node
from llmc.builder.trt.emitter import Emitter
from llmc.plugins.pointwise import visit


def _linear(e: Emitter, node: Node) -> list[Any]:
    a, (x, w, *rest) = node.attrs, [e.values[name] for name in node.inputs]
    kind = e.types[node.inputs[1]].dtype
    if a.x_per_token:
        raise ValueError("inputs are scaled by token, and TensorRT takes constant scales: --fp8-activations static")
    if kind not in ("f32", "bf16", "f8e4m3"):
        raise ValueError(f"a weight in {kind} has no TensorRT form here")
    product = "f32" if kind == "f32" else "bf16"
    if kind == "f8e4m3":
        layer = e.network.add_dequantize(w, rest.pop(0), e.dtype("bf16"))
        layer.axis = 0
        w = layer.get_output(0)
        if a.x_scale is not None:
            scale = e.constant(np.asarray(a.x_scale, np.float32), "f32")
            x = e.network.add_quantize(x, scale, e.dtype("f8e4m3")).get_output(0)
            x = e.network.add_dequantize(x, scale, e.dtype("bf16")).get_output(0)
    none, turned = e.trt.MatrixOperation.NONE, e.trt.MatrixOperation.TRANSPOSE
    y = e.cast(e.network.add_matrix_multiply(e.cast(x, product), none, w, turned).get_output(0), "f32")
    if a.all_reduce and e.tp > 1:
        y = e.all_reduce(y)
    if rest:
        y = e.apply("add", y, rest.pop(0))
    activation, gate, _ = a.epilogue.partition("_gate")
    if gate:
        size = int(node.type.shape[1])
        left, right = e.last_columns(y, 0, size), e.last_columns(y, size, 2 * size)
        return [e.apply("mul", e.apply(activation, left), right)]
    return [y if activation == "none" else e.apply(activation, y)]


def normed(e: Emitter, x: Any, weight: Any, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    square = e.apply("add", e.mean(e.apply("square", x)), e.number(eps, len(x.shape)))
    return e.apply("mul", e.apply("div", x, e.apply("sqrt", square)), weight)


def _rms_norm(e: Emitter, node: Node) -> list[Any]:
    x, w, *residual = (e.values[name] for name in node.inputs)
    total = e.apply("add", x, *residual) if residual else x
    y = normed(e, total, w, node.attrs.eps)
    return [total, y] if residual else [y]


def _layer_norm(e: Emitter, node: Node) -> list[Any]:
    x, w, b, *residual = (e.values[name] for name in node.inputs)
    total = e.apply("add", x, *residual) if residual else x
    y = e.apply("add", normed(e, e.apply("sub", total, e.mean(total)), w, node.attrs.eps), b)
    return [total, y] if residual else [y]


def _all_reduce(e: Emitter, node: Node) -> list[Any]:
    x = e.values[node.inputs[0]]
    return [e.all_reduce(x) if e.tp > 1 else x]


def _embedding(e: Emitter, node: Node) -> list[Any]:
    ids, table = (e.values[name] for name in node.inputs)
    return [e.cast(e.gather(table, ids), "f32")]


def _select_rows(e: Emitter, node: Node) -> list[Any]:
    return [e.gather(*(e.values[name] for name in node.inputs))]


def _pointwise(e: Emitter, node: Node) -> list[Any]:
    operands = [e.cast(e.values[name], "f32") for name in node.inputs]
    rank = node.type.rank
    return [visit(node.attrs.expr, lambda i: operands[i], lambda value: e.number(value, rank), e.apply)]


def _copy(e: Emitter, node: Node) -> list[Any]:
    a, (x, *others) = node.attrs, [e.values[name] for name in node.inputs]
    rank = e.types[node.inputs[0]].rank
    if a.kind == "transpose":
        return [e.transpose(x, a.perm)]
    if a.kind == "concat":
        return [e.concat([x, *others], a.axis % rank)]
    if a.kind == "slice":
        return _slice(e, node)
    raise ValueError(f"a copy of the kind {a.kind} has no TensorRT form here")


def _reshape(e: Emitter, node: Node) -> list[Any]:
    return [e.reshape(e.values[node.inputs[0]], [-1 if isinstance(d, str) else d for d in node.attrs.shape])]


def _slice(e: Emitter, node: Node) -> list[Any]:
    a, rank = node.attrs, e.types[node.inputs[0]].rank
    if a.axis % rank != rank - 1 or a.step != 1:
        raise ValueError(f"a slice of axis {a.axis} in steps of {a.step} has no TensorRT form here")
    return [e.last_columns(e.values[node.inputs[0]], a.start, a.stop)]


#: Operator -> its layers; raises ValueError for a form that has none.
LAYERS: dict[str, Callable[[Emitter, Node], list[Any]]] = {
    "linear": _linear,
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
