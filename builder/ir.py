"""The graph: small, frozen, printable.

Comes in: operators. Goes out: `Graph`, its text and back. Must not know: passes.

    graph smollm2 rank=0 tp=1 {
      %ids: i32[T] = input() {name="ids"}
      %w: f32[64,32] = param() {recipe="load('model.embed_tokens.weight')"}
      %x, %y: f32[T,32], f32[T,32] = rms_norm(%h, %g, %r) {eps=1e-05, residual=true} @model.layers.0.input_layernorm
      return %y
    }

Attribute values are Python literals (numbers, strings, tuples, None, True/False); `@path` is the module that a node
came from. Values are single assignment, and nodes stand in an order in which every input precedes its use. A line that
starts with `#` is a comment.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.artifacts.types import TensorType


class GraphError(ValueError):
    """A graph that breaks a rule; the message names the node."""


@dataclass(frozen=True)
class Node:
    """`outputs` are value names without `%`; `types` their types; `attrs` the operator's frozen dataclass."""

    op: str
    inputs: tuple[str, ...]
    attrs: Any
    outputs: tuple[str, ...]
    types: tuple[TensorType, ...]
    path: str = ""

    @property
    def out(self) -> str:
        """The only output's name."""
        if len(self.outputs) != 1:
            raise GraphError(f"{self.op} %{self.outputs[0]} has {len(self.outputs)} outputs")
        return self.outputs[0]

    @property
    def type(self) -> TensorType:
        """The only output's type."""
        self.out  # noqa: B018  raises for several outputs
        return self.types[0]

    def replace(self, **changes: Any) -> Node:
        """The same node with other fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Graph:
    """`nodes` in execution order and the names of the returned values."""

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    rank: int = 0
    tp: int = 1

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def producers(self) -> dict[str, Node]:
        """Value name -> the node that makes it."""
        return {out: node for node in self.nodes for out in node.outputs}

    def users(self) -> dict[str, list[Node]]:
        """Value name -> the nodes that read it, in order (a returned value also has no node for that)."""
        table: dict[str, list[Node]] = {out: [] for node in self.nodes for out in node.outputs}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                table[name].append(node)
        return table

    def types(self) -> dict[str, TensorType]:
        """Value name -> its type."""
        return {out: t for node in self.nodes for out, t in zip(node.outputs, node.types, strict=True)}

    def with_nodes(self, nodes: Iterable[Node], outputs: tuple[str, ...] | None = None) -> Graph:
        """The same graph with other nodes and, where given, other returned values."""
        return dataclasses.replace(self, nodes=tuple(nodes), outputs=self.outputs if outputs is None else outputs)

    def validate(self, operators: Mapping[str, Any]) -> None:
        """Raises GraphError unless names, order and every node's types obey the operators' rules."""
        types: dict[str, TensorType] = {}
        for node in self.nodes:
            where = f"{node.op} %{', %'.join(node.outputs)}" + (f" @{node.path}" if node.path else "")
            if node.op not in operators:
                raise GraphError(f"{where}: no operator of that name")
            for name in node.inputs:
                if name not in types:
                    raise GraphError(f"{where}: input %{name} is not defined before it")
            try:
                inferred = operators[node.op].infer(node.attrs, [types[n] for n in node.inputs])
            except ValueError as error:
                raise GraphError(f"{where}: {error}") from error
            if inferred and tuple(inferred) != node.types:
                raise GraphError(f"{where}: declared {_types(node.types)}, rule gives {_types(inferred)}")
            for out, kind in zip(node.outputs, node.types, strict=True):
                if out in types:
                    raise GraphError(f"{where}: %{out} is defined twice")
                types[out] = kind
        for name in self.outputs:
            if name not in types:
                raise GraphError(f"returned value %{name} is not defined")

    def __str__(self) -> str:
        lines = [f"graph {self.name} rank={self.rank} tp={self.tp} {{"]
        lines += [f"  {format_node(node)}" for node in self.nodes]
        lines += [f"  return {', '.join('%' + o for o in self.outputs)}", "}"]
        return "\n".join(lines) + "\n"


#: The first number in a module path.
LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layer_of(path: str) -> int | None:
    """The layer that a module path lies in (`model.layers.3.mlp` is in 3), or None."""
    match = LAYER.search(path)
    return int(match[1]) if match else None


def _types(types: Iterable[TensorType]) -> str:
    return ", ".join(str(t) for t in types)


def format_node(node: Node) -> str:
    """A node as one line of a graph's text."""
    attrs = ", ".join(f"{f.name}={_literal(getattr(node.attrs, f.name))}" for f in dataclasses.fields(node.attrs))
    text = f"%{', %'.join(node.outputs)}: {_types(node.types)} = {node.op}({', '.join('%' + i for i in node.inputs)})"
    return text + (f" {{{attrs}}}" if attrs else "") + (f" @{node.path}" if node.path else "")


def _literal(value: Any) -> str:
    """`repr`, but infinity as a number that overflows to it: `inf` is no literal."""
    if isinstance(value, tuple):
        parts = [_literal(part) for part in value]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


_HEAD = re.compile(r"graph (\S+) rank=(\d+) tp=(\d+) \{")
_NODE = re.compile(r"(%[^:]+): (.+?) = (\w+)\(([^)]*)\)(?: \{(.*)\})?(?: @(\S+))?")


def parse_graph(text: str, attrs_of: Callable[[str], type]) -> Graph:
    """The graph that `str(graph)` printed. `attrs_of(op)` gives an operator's attribute class; raises GraphError."""
    graphs = parse_graphs(text, attrs_of)
    if len(graphs) != 1:
        raise GraphError(f"line 1: the text holds {len(graphs)} graphs, not one")
    return graphs[0]


def parse_graphs(text: str, attrs_of: Callable[[str], type]) -> tuple[Graph, ...]:
    """The graphs of a text, one after the other (those of a model's ranks); raises GraphError with the line."""
    graphs: list[Graph] = []
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            lines.append((number, line))
        if line == "}":
            graphs.append(_parse_one(lines, attrs_of))
            lines = []
    if lines or not graphs:
        raise GraphError(f"line {lines[0][0] if lines else 1}: {_FORM}")
    return tuple(graphs)


_FORM = "a graph starts with 'graph NAME rank=N tp=N {' and ends with '}'"


def _parse_one(lines: Sequence[tuple[int, str]], attrs_of: Callable[[str], type]) -> Graph:
    head = _HEAD.fullmatch(lines[0][1])
    if not head:
        raise GraphError(f"line {lines[0][0]}: {_FORM}")
    nodes, outputs = [], None
    for number, line in lines[1:-1]:
        if line.startswith("return "):
            outputs = tuple(name.strip().lstrip("%") for name in line[7:].split(","))
            continue
        match = _NODE.fullmatch(line)
        if not match:
            raise GraphError(f"line {number}: cannot read {line!r}")
        try:
            nodes.append(_parse_node(match, attrs_of))
        except (ValueError, TypeError, KeyError, SyntaxError) as error:
            raise GraphError(f"line {number}: {error}") from error
    if outputs is None:
        raise GraphError(f"line {lines[-1][0]}: the graph returns nothing: a 'return' line is missing")
    return Graph(head[1], tuple(nodes), outputs, int(head[2]), int(head[3]))


def _parse_node(match: re.Match[str], attrs_of: Callable[[str], type]) -> Node:
    values: dict[str, Any] = {}
    if match[5]:
        call = ast.parse(f"f({match[5]})", mode="eval").body
        assert isinstance(call, ast.Call)
        values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    types = tuple(TensorType.parse(t) for t in re.findall(r"\w+\[[^\]]*\]", match[2]))
    inputs = tuple(i.strip().lstrip("%") for i in match[4].split(",") if i.strip())
    outputs = tuple(o.strip().lstrip("%") for o in match[1].split(","))
    return Node(match[3], inputs, attrs_of(match[3])(**values), outputs, types, match[6] or "")
