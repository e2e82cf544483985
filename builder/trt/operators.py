"""llmc's operators as TensorRT layers, for decode steps: every sequence has one token. Comes in: a `Node`, an
`Emitter`. Goes out: tensors. Must not know: engines, files.

Keys and values lie in linear caches bf16[num_seqs, kv_heads, max_context, head_dim], which TensorRT's own attention
reads; block tables would need a plug-in. FP8 is Q/DQ with constant scales, which is all that TensorRT takes.
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
    if kind not in ("f32", "bf16", "f8e4m3") or a.all_reduce:
        raise ValueError(f"a weight in {kind}{', summed over ranks,' * a.all_reduce} has no TensorRT form here")
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
    if rest:
        y = e.apply("add", y, rest.pop(0))
    activation, gate, _ = a.epilogue.partition("_gate")
    if gate:
        size = int(node.type.shape[1])
        left, right = e.last_columns(y, 0, size), e.last_columns(y, size, 2 * size)
        return [e.apply("mul", e.apply(activation, left), right)]
    return [y if activation == "none" else e.apply(activation, y)]


def _normed(e: Emitter, x: Any, weight: Any, eps: float) -> Any:
    square = e.apply("add", e.mean(e.apply("square", x)), e.number(eps, len(x.shape)))
    return e.apply("mul", e.apply("div", x, e.apply("sqrt", square)), weight)


def _rms_norm(e: Emitter, node: Node) -> list[Any]:
    x, w, *residual = (e.values[name] for name in node.inputs)
    total = e.apply("add", x, *residual) if residual else x
    y = _normed(e, total, w, node.attrs.eps)
    return [total, y] if residual else [y]


def _layer_norm(e: Emitter, node: Node) -> list[Any]:
    x, w, b, *residual = (e.values[name] for name in node.inputs)
    total = e.apply("add", x, *residual) if residual else x
    y = e.apply("add", _normed(e, e.apply("sub", total, e.mean(total)), w, node.attrs.eps), b)
    return [total, y] if residual else [y]


def _rope_cache(e: Emitter, node: Node) -> list[Any]:
    a, (q, k, v, *rest) = node.attrs, [e.values[name] for name in node.inputs]
    if a.style != "half" or a.norm_last or a.norm_bias or a.kv_scales or a.value_dim != a.head_dim:
        raise ValueError("only pairs (i, i + rotary/2), and keys and values of one width in bf16, have a form here")
    if a.has_norm and (a.norm, a.norm_scope) != ("rms", "head"):
        raise ValueError(f"a {a.norm} norm over {a.norm_scope} has no TensorRT form here")
    heads = [e.reshape(x, (-1, n, a.head_dim)) for x, n in ((q, a.heads), (k, a.kv_heads), (v, a.kv_heads))]
    turns = [e.reshape(rest.pop(0), (-1, 1, a.rotary)) for _ in range(2)] if a.rotary else []
    for i in range(2):
        if a.has_norm:
            heads[i] = _normed(e, heads[i], rest.pop(0), a.qk_norm_eps)
        if turns:
            heads[i] = _rotated(e, heads[i], turns, a.rotary, a.head_dim)
    for name, x in zip(("keys", "values"), heads[1:], strict=True):
        new = e.cast(e.reshape(x, (-1, a.kv_heads, 1, a.head_dim)), "bf16")
        update = e.network.add_kv_cache_update(
            e.values[f"{name}.{a.layer}"], new, e.values["write_indices"], e.trt.KVCacheMode.LINEAR
        )
        e.values[f"{name}.{a.layer}.out"] = update.get_output(0)
    return [heads[0]]


def _rotated(e: Emitter, x: Any, turns: list[Any], rotary: int, width: int) -> Any:
    low, high = e.last_columns(x, 0, rotary // 2), e.last_columns(x, rotary // 2, rotary)
    head = e.concat([low, high], 2)
    turned = e.concat([e.apply("neg", high), low], 2)
    out = e.apply("add", e.apply("mul", head, turns[0]), e.apply("mul", turned, turns[1]))
    return out if rotary == width else e.concat([out, e.last_columns(x, rotary, width)], 2)


def _attention(e: Emitter, node: Node) -> list[Any]:
    a = node.attrs
    if a.window or a.chunk or a.softcap or a.slopes or a.sinks:
        raise ValueError("TensorRT's attention has no window, softcap, slopes or sinks")
    q = e.apply("mul", e.values[node.inputs[0]], e.number(a.scale, 3))
    q = e.cast(e.reshape(q, (-1, a.heads, 1, a.head_dim)), "bf16")
    keys, values = (e.values[f"{name}.{a.layer}.out"] for name in ("keys", "values"))
    softmax, mask = e.trt.AttentionNormalizationOp.SOFTMAX, e.trt.CausalMaskKind.NONE
    layer = e.network.add_attention_v2(q, keys, values, softmax, mask)
    layer.key_value_lengths = e.values["context_len"]
    layer.decomposable = True
    return [e.cast(e.reshape(layer.get_output(0), (-1, a.heads * a.head_dim)), "f32")]


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
    if a.kind == "slice" and a.axis % rank == rank - 1 and a.step == 1:
        return [e.last_columns(x, a.start, a.stop)]
    raise ValueError(f"a copy of the kind {a.kind} has no TensorRT form here")


def _reshape(e: Emitter, node: Node) -> list[Any]:
    return [e.reshape(e.values[node.inputs[0]], [-1 if isinstance(d, str) else d for d in node.attrs.shape])]


def _slice(e: Emitter, node: Node) -> list[Any]:
    return [e.last_columns(e.values[node.inputs[0]], node.attrs.start, node.attrs.stop)]


#: Operator -> its layers; raises ValueError for a form that has none.
LAYERS: dict[str, Callable[[Emitter, Node], list[Any]]] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope_cache": _rope_cache,
    "paged_attention": _attention,
    "embedding": _embedding,
    "select_rows": _select_rows,
    "pointwise": _pointwise,
    "copy": _copy,
    "reshape": _reshape,
    "slice": _slice,
}
