"""What another graph has no form of, refused by name. Comes in: a graph, a writer's translations. Goes out: results, or
UnsupportedError. Must not know: whose graph is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.ir import Graph, Node

Writer = TypeVar("Writer")
Value = TypeVar("Value")
#: Nodes that have no translation: they are inputs and constants of the other graph.
LEAVES = ("input", "param", "const")


def require_translations(
    graph: Graph, translations: Collection[str], dtypes: Collection[str], whose: str, instead: str = ""
) -> None:
    """Raises UnsupportedError naming every operator that is not among `translations`, and a module that uses it; or a
    parameter whose dtype is not among `dtypes`. `whose`: the other graph's name; `instead`: what to build with.
    """
    stuck: dict[str, str] = {}
    for node in graph:
        if node.op not in translations and node.op not in LEAVES:
            stuck.setdefault(node.op, node.path)
    if stuck:
        places = "; ".join(f"{op} (in {path})" for op, path in sorted(stuck.items()))
        raise UnsupportedError(f"no {whose} form of these operators: {places}")
    for node in graph:
        if node.op == "param" and node.type.dtype not in dtypes:
            where, remedy = node.attrs.recipe, f"; {instead}" if instead else ""
            raise UnsupportedError(f"{where}: a weight in {node.type.dtype} has no {whose} form here{remedy}")


def translated(
    translations: Mapping[str, Callable[[Writer, Node], Sequence[Value]]], writer: Writer, node: Node
) -> dict[str, Value]:
    """Values of the node's results by their names. Raises UnsupportedError for a form that the other graph has not."""
    try:
        results = translations[node.op](writer, node)
    except ValueError as error:
        raise UnsupportedError(f"{node.op} @{node.path}: {error}") from error
    return dict(zip(node.outputs, results, strict=True))
