"""A product that rounds its x to FP8 becomes two operators: `quantize`, and a product that reads numbers and scales.

Comes in: `linear` and `grouped_linear` with E4M3 weights and `x_scale` or `x_per_token`. Goes out: one `quantize` for
all products that round the same value alike. A GPU multiplies E4M3 as it lies in memory, so that rounding is work of
its own there; the cpu target has no use for this. Must not know: layers.
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report


def _rounds(view: View, node: Node) -> bool:
    """Whether a product rounds its x to FP8: the same attributes beside an INT8 weight mean INT8."""
    weight = node.inputs[1 if node.op == "linear" else 2]
    rounds = node.attrs.x_per_token or node.attrs.x_scale is not None
    return rounds and view.types[weight].dtype == "f8e4m3"


def split_quantize(graph: Graph) -> tuple[Graph, PassReport]:
    """Gives each input that a product rounds to FP8 an operator that does so."""
    view, edit = View(graph), Edit(graph)
    made: dict[tuple[str, float | None], Node] = {}
    matched = 0
    for node in graph:
        if node.op not in ("linear", "grouped_linear") or not _rounds(view, node):
            continue
        x, *others = node.inputs
        rounding = made.get((x, node.attrs.x_scale))
        if rounding is None:
            attrs = {"scale": node.attrs.x_scale}
            outputs = (edit.fresh(f"{x}_fp8"), edit.fresh(f"{x}_scale"))
            rounding = edit.make("quantize", [x], [view.types[x]], attrs, like=node, outputs=outputs)
            made[x, node.attrs.x_scale] = rounding
            edit.before(node, rounding)
        numbers, scales = rounding.outputs
        types = [rounding.types[0], *(view.types[name] for name in others), rounding.types[1]]
        attrs = vars(node.attrs) | {"x_scale": None, "x_per_token": False}
        inputs = [numbers, *others, scales]
        edit.swap(node, edit.make(node.op, inputs, types, attrs, like=node, outputs=node.outputs))
        matched += 1
    after = edit.finish()
    return after, report("split_quantize", graph, after, matched)
