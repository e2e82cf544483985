"""Which nodes are views (a pointer and a row stride into a value that another node computed) and which are launches.

Comes in: nodes, graphs. Goes out: `is_view`, `count_launches`. Must not know: kernels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llmc.builder.ir import Graph, Node, layer_of

#: Operators that stand in a lowered graph without a kernel.
SILENT = frozenset({"input", "param", "const", "reshape", "slice"})


def is_view(node: Node) -> bool:
    """A reshape, or a unit-step slice of the last axis of a [rows, columns] value."""
    if node.op == "reshape":
        return True
    a = node.attrs
    return node.op == "slice" and node.types[0].rank == 2 and a.axis in (-1, 1) and a.step == 1


#: Operators for whatever no fused pattern claims.
GENERIC = frozenset({"pointwise", "reduce", "rowwise", "copy"})


@dataclass(frozen=True)
class Launches:
    """Kernel launches of one step, and how many of them a layer has on average (by the layer number in their path).
    `generic`: those of generic code, by operator.
    """

    total: int
    per_layer: float
    layers: int
    generic: dict[str, int]


def count_launches(graph: Graph) -> Launches:
    """Counts the nodes of a lowerable graph that are no views, inputs or weights."""
    found = [node for node in graph if node.op not in SILENT]
    layers = [layer for node in found if (layer := layer_of(node.path)) is not None]
    count = len(set(layers))
    generic = Counter(node.op for node in found if node.op in GENERIC)
    return Launches(len(found), len(layers) / count if count else 0.0, count, dict(sorted(generic.items())))
