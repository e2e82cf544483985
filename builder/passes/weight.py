"""Weights seen from passes: the recipe that a value amounts to, where it is computed from parameters alone.

Comes in: a value. Goes out: its `Recipe`, or None. Must not know: how recipes are executed.
"""

from __future__ import annotations

from llmc.builder.passes.rewrite import View, size_of
from llmc.builder.weights.recipe import Add, Mul, Recipe, Reshape, Swap, Transpose, parse


def weight_recipe(view: View, value: str) -> Recipe | None:
    """The recipe of a parameter, also behind `+ constant`, `* constant`, a transpose and the cut of a matrix into a
    stack of matrices; None for anything else.
    """
    node = view.producers[value]
    if node.op == "param":
        return parse(node.attrs.recipe)
    if node.op == "transpose" and tuple(node.attrs.perm) in ((1, 0), (0, 2, 1)):
        source = weight_recipe(view, node.inputs[0])
        if source is None:
            return None
        return Transpose(source) if len(node.attrs.perm) == 2 else Swap(source, 1, 2)
    if node.op == "reshape" and node.type.rank == 3:
        source = weight_recipe(view, node.inputs[0])
        return None if source is None else Reshape(source, tuple(size_of(d) for d in node.type.shape))
    if node.op not in ("add", "mul"):
        return None
    for weight, constant in (node.inputs, node.inputs[::-1]):
        number, source = view.scalar(constant), weight_recipe(view, weight)
        if number is not None and source is not None:
            return Add(source, number) if node.op == "add" else Mul(source, number)
    return None
