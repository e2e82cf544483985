"""Factors that linear layers multiply their input by move into the norm that makes it: done once, by the build.

Comes in: `linear` with `x_factors`, final norms. Goes out: norms with weights (and biases) times the factors, and
linears without. Must not know: layers, where factors come from.

A norm whose result anything else reads as well, or readers with other factors, stay as they are: the linears multiply.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.recipe import Recipe, Times
from llmc.plugins.linear import FACTORS


def fold_factors(graph: Graph) -> tuple[Graph, PassReport]:
    """Moves the factors of an input into the norm before it, where all that read its result have the same."""
    view, edit = View(graph), Edit(graph)
    matched = 0
    for norm in graph:
        readers = view.users[norm.outputs[-1]] if norm.op in ("rms_norm", "layer_norm") else []
        factors = _common(view, readers)
        if factors is None or norm.outputs[-1] in graph.outputs:
            continue
        weights = norm.inputs[1 : 2 + (norm.op == "layer_norm")]
        recipes = [weight_recipe(view, name) for name in weights]
        if None in recipes:
            continue
        made = [
            edit.param(Times(recipe, factors), view.types[name], norm)
            for name, recipe in zip(weights, recipes, strict=True)
            if recipe is not None
        ]
        inputs = (norm.inputs[0], *(param.out for param in made), *norm.inputs[1 + len(made) :])
        edit.swap(norm, norm.replace(inputs=inputs))
        for reader in readers:
            edit.swap(reader, _without(view, edit, reader))
        matched += len(readers)
    after = edit.finish()
    left = [node for node in after if node.op == "linear" and node.attrs.x_factors]
    notes = [f"{node.op} @{node.path}: multiplies its input by factors" for node in left]
    return after, report("fold_factors", graph, after, matched, notes=notes)


def _common(view: View, readers: Sequence[Node]) -> Recipe | None:
    """The factors that all readers have, None where there are no such."""
    if not readers or any(reader.op != "linear" or not reader.attrs.x_factors for reader in readers):
        return None
    found = {weight_recipe(view, reader.inputs[FACTORS]) for reader in readers}
    return found.pop() if len(found) == 1 else None


def _without(view: View, edit: Edit, reader: Node) -> Node:
    """The linear without its factors."""
    inputs = [*reader.inputs[:FACTORS], *reader.inputs[FACTORS + 1 :]]
    attrs = vars(reader.attrs) | {"x_factors": False}
    return edit.make("linear", inputs, [view.types[n] for n in inputs], attrs, like=reader, outputs=reader.outputs)
