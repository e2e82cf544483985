"""Which modules of a graph are built alike: of layers that are, a pass must match all or none.

Comes in: a graph, module paths. Goes out: `Structure`. Must not know: passes, families, what a module computes.

Modules are alike if their paths differ in the layer number alone and the weights that they and the modules below them
read have the same names, shapes and dtypes. What a module reads is known by where its weights entered the graph, as
names in a checkpoint may have other paths than modules. So a layer with experts is not held against one without, nor
one kept in bf16 against one in FP8; but two layers whose tensors are the same and whose computation differs are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from llmc.artifacts.types import TensorType
from llmc.builder.ir import LAYER, Graph, layer_of
from llmc.builder.weights.recipe import leaves, parse


def kind_of(path: str) -> str:
    """A module path without its layer number."""
    return LAYER.sub(lambda m: m[0].replace(m[1], "*"), path, count=1)


class Structure:
    """`paths`: every module in a layer that computes something."""

    def __init__(self, graph: Graph) -> None:
        self.paths = sorted({n.path for n in graph if n.op != "param" and layer_of(n.path) is not None})
        self._below: defaultdict[str, set[tuple[str, TensorType]]] = defaultdict(set)
        for node in graph:
            if node.op == "param":
                for leaf in leaves(parse(node.attrs.recipe)):
                    self._add([*node.path.split("."), leaf.name.rpartition(".")[2]], node.type)

    def _add(self, parts: Sequence[str], kind: TensorType) -> None:
        for depth in range(1, len(parts)):
            self._below[".".join(parts[:depth])].add((".".join(parts[depth:]), kind))

    def alike(self, path: str) -> Hashable:
        """Equal for modules that are alike: the kind, and the tensors of the module, or where it has none of the one
        around it.
        """
        owner = path
        while owner not in self._below and layer_of(owner) is not None:
            owner = owner.rpartition(".")[0]
        inside = layer_of(owner) is not None
        return kind_of(path), frozenset(self._below[owner]) if inside else frozenset()

    def alike_after(self, path: str) -> Hashable:
        """The same for what follows from one layer to the next: the layers around the module and before it count."""
        match = LAYER.search(path)
        if match is None:
            return kind_of(path)
        stem, number = path[: match.start(1)], int(match[1])
        return kind_of(path), *(frozenset(self._below.get(f"{stem}{n}", ())) for n in (number - 1, number))
