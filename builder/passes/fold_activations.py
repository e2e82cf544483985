"""Activations spelled out in primitives get their name: `silu`, `gelu` and `gelu_tanh`.

Comes in, goes out: primitives. Must not know: linear layers.
"""

from __future__ import annotations

import math

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, Pattern, Value, View, first, op, report_places

_X = Value("x")
_CUBE = op("pow", _X, 3.0) | op("mul", op("mul", _X, _X), _X) | op("mul", op("square", _X), _X)
_INNER = op("mul", op("add", _X, op("mul", _CUBE, 0.044715)), math.sqrt(2 / math.pi))
_TANH = op("add", op("tanh", _INNER), 1.0)
_ERF = op("add", op("erf", op("div", _X, math.sqrt(2)) | op("mul", _X, math.sqrt(0.5))), 1.0)


def _halved(factor: Pattern) -> Pattern:
    """0.5 * x * factor in each order of multiplication."""
    return (
        op("mul", op("mul", _X, 0.5), factor)
        | op("mul", op("mul", _X, factor), 0.5)
        | op("mul", _X, op("mul", factor, 0.5))
    )


_NAMES = {
    "silu": op("mul", _X, op("sigmoid", _X)),
    "gelu_tanh": _halved(_TANH),
    "gelu": _halved(_ERF),
}


def fold_activations(graph: Graph) -> tuple[Graph, PassReport]:
    """Replaces each formula by the operator of that name."""
    view, edit = View(graph), Edit(graph)
    matched = []
    for node in graph:
        if node.op != "mul":
            continue
        for name, pattern in _NAMES.items():
            found = first(view, pattern, node.out)
            if found and view.types[found["x"]] == node.type:
                edit.swap(node, edit.make(name, [found["x"]], [node.type], like=node, outputs=node.outputs))
                matched.append(node.path)
                break
    after = edit.finish()
    return after, report_places("fold_activations", graph, after, matched)
