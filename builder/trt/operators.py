"""llmc's operators as TensorRT layers, but those of the cache. Comes in: a `Node`, an `Emitter`. Goes out: tensors.
Must not know: engines, files.

FP8 is Q/DQ with constant scales, which is all that TensorRT takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llmc.builder.ir import Node
from llmc.builder.translation import operators as common
from llmc.builder.trt.emitter import Emitter


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
    if a.all_reduce:
        y = e.all_reduce(y)
    if rest:
        y = e.apply("add", y, rest.pop(0))
    return [e.activated(y, a.epilogue, int(node.type.shape[1]))]


#: Operator -> its layers; raises ValueError for a form that has none.
LAYERS: dict[str, Callable[[Emitter, Node], list[Any]]] = {**common.TRANSLATIONS, "linear": _linear}
