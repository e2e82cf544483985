"""Resolves views: which computed value each value of a graph really is, from which byte on, with which row stride.

Comes in: a fused graph. Goes out: `Alias` for every value. Must not know: kernels, memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.ir import Graph, GraphError, Node


@dataclass(frozen=True)
class Alias:
    """The value begins `offset` bytes into the value `root`, and its rows lie `stride` elements apart."""

    root: str
    offset: int
    stride: int


def width(kind: TensorType) -> int:
    """Elements of one row: all axes but the first; 1 for a vector or a number."""
    return prod(int(d) for d in kind.shape[1:])


def resolve(graph: Graph) -> dict[str, Alias]:
    """An alias for every value; those that nodes compute are their own. Raises GraphError for what is no view."""
    types = graph.types()
    found: dict[str, Alias] = {}
    for node in graph:
        if node.op == "reshape":
            found[node.out] = _reshape(node, found[node.inputs[0]], types[node.inputs[0]])
        elif node.op == "slice":
            found[node.out] = _columns(node, found[node.inputs[0]], types[node.inputs[0]])
        else:
            found |= {out: Alias(out, 0, width(kind)) for out, kind in zip(node.outputs, node.types, strict=True)}
    return found


def _reshape(node: Node, source: Alias, kind: TensorType) -> Alias:
    if source.stride != width(kind):
        raise GraphError(f"reshape %{node.out} @{node.path}: the rows of %{node.inputs[0]} do not lie side by side")
    return Alias(source.root, source.offset, width(node.type))


def _columns(node: Node, source: Alias, kind: TensorType) -> Alias:
    a = node.attrs
    if kind.rank != 2 or a.axis not in (1, -1) or a.step != 1:
        raise GraphError(f"slice %{node.out} @{node.path}: only columns of a matrix are a view")
    return Alias(source.root, source.offset + a.start * NUMPY_DTYPES[kind.dtype].itemsize, source.stride)
