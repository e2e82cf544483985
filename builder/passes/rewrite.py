"""What passes are written with: patterns over values, and an editor that records changes to a frozen graph.

Comes in: a `Graph`. Goes out: bindings of patterns, the rewritten `Graph`. Must not know: what any operator means.

    x = Value("x")
    found = first(view, op("mul", x, op("sigmoid", x)), value)  # {"x": name} or None
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import Dim, TensorType
from llmc.builder.ir import Graph, GraphError, Node
from llmc.builder.operators import ALL
from llmc.builder.passes.structure import Structure, kind_of

Bindings = Mapping[str, Any]
_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum"})


class View:
    """A graph with the tables that matching needs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.users = graph.users()
        self.types = graph.types()

    def producer(self, value: str, *ops: str) -> Node | None:
        """The node that makes the value, or None where it is none of `ops` (any, where none are named)."""
        node = self.producers[value]
        return node if not ops or node.op in ops else None

    def scalar(self, value: str) -> float | None:
        """The number that a one-element constant holds: of all that round to that float32, the shortest (1e-05)."""
        node = self.producers[value]
        if node.op != "const" or len(node.attrs.values) != 1:
            return None
        number = node.attrs.values[0]
        return float(str(np.float32(number))) if node.type.dtype == "f32" else float(number)

    def only_user(self, value: str) -> Node | None:
        """The one node that reads the value, None where there are several or where the graph returns it."""
        users = self.users[value]
        return users[0] if len(users) == 1 and value not in self.graph.outputs else None


class Pattern:
    """A shape of computation. `match` yields every way in which a value fits, as bindings of names."""

    def match(self, view: View, value: str, bound: Bindings) -> Iterator[Bindings]:
        """Every way in which `value` fits, each adding to the names that are `bound` already."""
        raise NotImplementedError

    def __or__(self, other: Pattern) -> Pattern:
        return _Either((self, other))


@dataclass(frozen=True)
class _Either(Pattern):
    choices: tuple[Pattern, ...]

    def match(self, view: View, value: str, bound: Bindings) -> Iterator[Bindings]:
        for choice in self.choices:
            yield from choice.match(view, value, bound)


@dataclass(frozen=True)
class Value(Pattern):
    """Any value; the same name must be the same value everywhere in the pattern."""

    name: str

    def match(self, view: View, value: str, bound: Bindings) -> Iterator[Bindings]:
        """Fits unless the name is bound to another value."""
        if bound.get(self.name, value) == value:
            yield {**bound, self.name: value}


@dataclass(frozen=True)
class Scalar(Pattern):
    """A one-element constant: bound by name, or equal (to 1e-4 of its size) to a number."""

    wanted: str | float

    def match(self, view: View, value: str, bound: Bindings) -> Iterator[Bindings]:
        """Fits a constant of one element."""
        number = view.scalar(value)
        if number is None:
            return
        if isinstance(self.wanted, str):
            if bound.get(self.wanted, number) == number:
                yield {**bound, self.wanted: number}
        elif abs(number - self.wanted) <= 1e-4 * abs(self.wanted):
            yield bound


@dataclass(frozen=True)
class Op(Pattern):
    """A node with these inputs (in either order where the operator commutes) and at least these attributes."""

    op: str
    args: tuple[Pattern, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    name: str | None = None

    def match(self, view: View, value: str, bound: Bindings) -> Iterator[Bindings]:
        """Fits a node whose inputs fit."""
        node = view.producers[value]
        if node.op != self.op or len(node.inputs) != len(self.args):
            return
        if any(getattr(node.attrs, key) != wanted for key, wanted in self.attrs):
            return
        if self.name is not None:
            bound = {**bound, self.name: node}
        yield from _match_all(view, self.args, node.inputs, bound)
        if self.op in _COMMUTATIVE:
            yield from _match_all(view, self.args, node.inputs[::-1], bound)


def op(name: str, *args: Pattern | float, bind: str | None = None, **attrs: Any) -> Pattern:
    """A node of operator `name`; numbers stand for constants, `bind` names the node itself in the bindings."""
    patterns = tuple(a if isinstance(a, Pattern) else Scalar(a) for a in args)
    return Op(name, patterns, tuple(attrs.items()), bind)


def _match_all(view: View, patterns: Sequence[Pattern], values: Sequence[str], bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for more in patterns[0].match(view, values[0], bound):
        yield from _match_all(view, patterns[1:], values[1:], more)


def first(view: View, pattern: Pattern, value: str) -> Bindings | None:
    """The first way in which the value fits the pattern, or None."""
    return next(pattern.match(view, value, {}), None)


@dataclass
class Edit:
    """Changes to one graph, applied together by `finish`. Node order and dead code take care of themselves."""

    graph: Graph
    _before: dict[str, list[Node]] = field(default_factory=dict)
    _swapped: dict[str, list[Node]] = field(default_factory=dict)
    _renamed: dict[str, str] = field(default_factory=dict)
    _front: list[Node] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names = {out for node in self.graph for out in node.outputs}

    def fresh(self, stem: str) -> str:
        """A value name that nobody has: the stem, with a number where it is taken."""
        stem = re.sub(r"\.\d+$", "", stem)
        name, count = stem, 0
        while name in self._names:
            count += 1
            name = f"{stem}.{count}"
        self._names.add(name)
        return name

    def make(
        self,
        op: str,
        inputs: Sequence[str],
        types: Sequence[TensorType],
        attrs: Mapping[str, Any] | None = None,
        *,
        like: Node,
        outputs: Sequence[str] | None = None,
        stem: str = "",
    ) -> Node:
        """A new node (not yet placed) whose output types follow from its input `types`; path and name after `like`.

        Raises GraphError naming the module where the operator's rule refuses them.
        """
        operator = ALL[op]
        values = operator.attrs(**(attrs or {}))
        try:
            inferred = operator.infer(values, list(types))
        except ValueError as error:
            raise GraphError(f"{op} @{like.path}: {error}") from error
        names = outputs or [self.fresh(stem or like.outputs[0]) for _ in inferred]
        return Node(op, tuple(inputs), values, tuple(names), tuple(inferred), like.path)

    def param(self, recipe: object, kind: TensorType, like: Node) -> Node:
        """A new weight, placed before everything else so that any node may read it."""
        attrs = ALL["param"].attrs(recipe=str(recipe))
        node = Node("param", (), attrs, (self.fresh(like.outputs[0]),), (kind,), like.path)
        self._front.append(node)
        return node

    def swap(self, node: Node, *new: Node) -> None:
        """Puts `new` in the node's place. Outputs that keep their name keep their readers; `rename` the others."""
        self._swapped[node.outputs[0]] = list(new)

    def before(self, node: Node, *new: Node) -> None:
        """Puts `new` in front of the node."""
        self._before.setdefault(node.outputs[0], []).extend(new)

    def rename(self, old: str, new: str) -> None:
        """Everything that reads `old` reads `new`, nodes that were made before included."""
        self._renamed[old] = new

    def _final(self, name: str) -> str:
        while name in self._renamed:
            name = self._renamed[name]
        return name

    def finish(self) -> Graph:
        """The graph with all changes: in an order that works, without nodes that nobody reads."""
        nodes = list(self._front)
        for node in self.graph:
            nodes += self._before.get(node.outputs[0], [])
            nodes += self._swapped.get(node.outputs[0], [node])
        nodes = [n.replace(inputs=tuple(map(self._final, n.inputs))) for n in nodes]
        outputs = tuple(map(self._final, self.graph.outputs))
        return tidy(self.graph.with_nodes(nodes, outputs))


def tidy(graph: Graph) -> Graph:
    """The live nodes, each after what it reads and otherwise in the order that they had; weights at first use."""
    producers = graph.producers()
    live: set[str] = set()
    wanted = list(graph.outputs)
    while wanted:
        name = wanted.pop()
        if name not in live:
            node = producers[name]
            live.update(node.outputs)
            wanted += node.inputs
    inputs = [n for n in graph if n.op == "input"]  # the signature stays, read or not
    ordered = list(inputs)
    placed = {n.outputs[0] for n in inputs}
    roots = [n for n in graph if n.op not in ("param", "const") and n.outputs[0] in live]
    for root in [*roots, *(producers[o] for o in graph.outputs)]:
        stack = [root]
        while stack:
            missing = [producers[n] for n in stack[-1].inputs if n not in placed]
            if missing:
                stack.append(missing[0])
                continue
            node = stack.pop()
            if node.outputs[0] not in placed:
                placed.update(node.outputs)
                ordered.append(node)
    return graph.with_nodes(ordered)


def report(
    name: str, before: Graph, after: Graph, matched: int, expected: int | None = None, notes: Iterable[str] = ()
) -> PassReport:
    """A PassReport with the node counts filled in."""
    return PassReport(name, matched, expected, len(before.nodes), len(after.nodes), tuple(notes))


def report_places(
    name: str,
    before: Graph,
    after: Graph,
    matched: Sequence[str],
    missed: Sequence[str] = (),
    other: Sequence[str] = (),
    *,
    follows: bool = False,
) -> PassReport:
    """The report of a pass that must match a module in every layer or in none. `matched` has the module of each match,
    `missed` those that looked as if they should, `other` those that rightly have nothing to match.

    Raises UnsupportedError where modules are alike (see `structure.py`; with `follows`, also by the layer before) and
    one has fewer matches than another: its layer would run at another speed unnoticed. What was missed in all layers
    alike costs speed only, and is noted.
    """
    structure = Structure(before)
    alike = structure.alike_after if follows else structure.alike
    counts = Counter(matched)
    wanted: dict[Hashable, int] = {}
    for path, count in counts.items():
        wanted[alike(path)] = max(wanted.get(alike(path), 0), count)
    rivals = {kind_of(path) for path in counts}
    places = {*counts, *missed, *(path for path in structure.paths if kind_of(path) in rivals)} - set(other)
    lost = sorted(path for path in places if counts[path] < wanted.get(alike(path), 0))
    if lost:
        group = {alike(path) for path in lost}
        total = sum(alike(path) in group for path in places)
        raise UnsupportedError(
            f"pass {name} matches {total - len(lost)} of {total} layers, not {', '.join(lost)}: these are built "
            "differently, and this compiler does not know how to fuse them. Please report the model's config"
        )
    notes = [f"no match for {kind}: runs as generic code" for kind in sorted(set(map(kind_of, missed)))]
    return report(name, before, after, len(matched), len(matched) + len(missed), notes)


def size_of(dim: Dim) -> int:
    """A dimension that must be a number."""
    if not isinstance(dim, int):
        raise UnsupportedError(f"dimension {dim} must be a number here")
    return dim
