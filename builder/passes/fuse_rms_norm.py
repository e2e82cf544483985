"""x * rsqrt(mean(x^2) + eps) * w becomes `rms_norm`, in the forms that Hugging Face models write it.

Comes in: primitives. Goes out: `rms_norm` over the last axis of a value of any rank; Gemma's `(1 + w)` moves into the
weight's recipe. Must not know: what the norm is for (input norms, q and k norms, final norm are alike).
"""

from __future__ import annotations

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import Edit, Scalar, Value, View, first, op, report_places
from llmc.builder.passes.weight import weight_recipe

_X = Value("x")
_SQUARE = op("pow", _X, 2.0) | op("square", _X) | op("mul", _X, _X)
_VARIANCE = op("add", op("reduce", _SQUARE, kind="mean", axis=-1, keepdim=True), Scalar("eps"))
_SCALE = op("rsqrt", _VARIANCE, bind="root") | op("pow", _VARIANCE, -0.5, bind="root")
_NORMED = op("mul", _X, _SCALE) | op("div", _X, op("sqrt", _VARIANCE, bind="root"))
_NORM = op("mul", _NORMED, Value("w"))
_INVERSE_ROOT = ("rsqrt", "pow", "sqrt")


def fuse_rms_norm(graph: Graph) -> tuple[Graph, PassReport]:
    """Replaces every RMS norm that has a weight. One place that does not match among others that do stops the build."""
    view, edit = View(graph), Edit(graph)
    matched, roots = [], set()
    for node in graph:
        found = first(view, _NORM, node.outputs[0]) if node.op == "mul" else None
        if not found:
            continue
        kind = view.types[found["x"]]
        recipe = weight_recipe(view, found["w"])
        if recipe is None or view.types[found["w"]].shape != kind.shape[-1:]:
            continue
        weight = edit.param(recipe, view.types[found["w"]], node)
        norm = edit.make(
            "rms_norm",
            [found["x"], weight.out],
            [kind, weight.type],
            {"eps": found["eps"]},
            like=node,
            outputs=node.outputs,
        )
        edit.swap(node, norm)
        matched.append(node.path)
        roots.add(found["root"].outputs[0])
    missed = [n.path or n.outputs[0] for n in graph if n.outputs[0] not in roots and first(view, _SCALE, n.outputs[0])]
    after = edit.finish()
    return after, report_places("fuse_rms_norm", graph, after, matched, missed)
