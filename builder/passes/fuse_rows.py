"""What chooses among the entries of each row, and the arithmetic around it, becomes one `rowwise` a place.

Comes in: `topk`, `gather`, `scatter`, comparisons and `where`, with reductions, elementwise nodes and moves between
them. Goes out: `rowwise` with a program. Must not know: what is chosen (experts, as a rule); families.

A node that only `rowwise` can compute founds a group; neighbours whose rows are short join it. A group must be
computable at one point: a node does not join where something outside the group stands between it and the group.
"""

from __future__ import annotations

from math import prod

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report
from llmc.builder.primitives.logic import COMPARISONS, LOGICAL
from llmc.plugins.pointwise.functions import ELEMENTWISE as ARITHMETIC
from llmc.plugins.rowwise.cpu import MAX_RANK
from llmc.plugins.rowwise.functions import ELEMENTWISE
from llmc.plugins.rowwise.program import input_name

#: What no other operator with a kernel does.
FOUNDERS = frozenset({"topk", "gather", "scatter", "where", "logical_not", *COMPARISONS, *LOGICAL})
_JOIN = FOUNDERS | ARITHMETIC | {"cast", "reduce", "reshape", "slice", "concat", "broadcast"}
#: The elements of the longest row that joins a group.
SHORT = 1024


def fuse_rows(graph: Graph) -> tuple[Graph, PassReport]:
    """Every founder ends in a `rowwise`."""
    view, edit = View(graph), Edit(graph)
    groups = _Groups(view).founded()
    for members in groups:
        _replace(view, edit, members)
    after = edit.finish()
    return after, report("fuse_rows", graph, after, len(groups))


def _may_join(view: View, node: Node) -> bool:
    """Whether a row program could compute the node: a row for each token, of a length that a thread's stack holds."""
    shapes = [node.type.shape, *(view.types[name].shape for name in node.inputs)] if node.op in _JOIN else [()]
    symbols = {d for shape in shapes for d in shape if isinstance(d, str)}
    if not shapes[0] or len(symbols) != 1 or shapes[0][0] not in symbols:
        return False
    if any(isinstance(d, str) for shape in shapes for d in shape[1:]) or max(map(len, shapes)) > MAX_RANK + 1:
        return False
    rank = node.types[0].rank
    if node.op in ("slice", "concat") and node.attrs.axis % rank < (1 if node.op == "slice" else rank - 1):
        return False
    if node.op == "reduce" and not (node.attrs.keepdim and node.attrs.axis in (-1, rank - 1)):
        return False
    return node.op in FOUNDERS or prod(int(d) for d in shapes[0][1:]) <= SHORT


class _Groups:
    """Groups of nodes that grow node by node, in the order of the graph. Each will be computed at one point."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.place = {node.outputs[0]: i for i, node in enumerate(view.graph)}
        self.of: dict[str, list[Node]] = {}  # first output of a member -> its group
        self.all: dict[int, list[Node]] = {}
        for node in view.graph:
            if _may_join(view, node):
                self._add(node)

    def _sources(self, node: Node) -> list[Node]:
        return [self.view.producers[name] for name in node.inputs]

    def _add(self, node: Node) -> None:
        """Joins the node with all groups that it reads and that can be joined; else it is a group of its own."""
        near = {id(g): g for s in self._sources(node) if (g := self.of.get(s.outputs[0]))}
        joined = [group for group in near.values() if not self._apart(node, group)]
        merged = sorted((n for group in joined for n in group), key=lambda n: self.place[n.outputs[0]])
        merged.append(node)
        self.of |= {member.outputs[0]: merged for member in merged}
        for group in joined:
            del self.all[id(group)]
        self.all[id(merged)] = merged

    def _apart(self, node: Node, group: list[Node]) -> bool:
        """Whether something outside the group, that depends on it, comes before the node."""
        begin = self._begin(group)
        wanted = [s for s in self._sources(node) if self.of.get(s.outputs[0]) is not group]
        seen: set[str] = set()
        while wanted:
            name = wanted.pop().outputs[0]
            if name in seen or self.place[name] < begin:
                continue
            unit = self.of.get(name, [self.view.producers[name]])  # a group comes as a whole
            if unit is group:
                return True
            seen |= {member.outputs[0] for member in unit}
            wanted += [s for member in unit for s in self._sources(member)]
        return False

    def _begin(self, group: list[Node]) -> int:
        """The place before which nothing waits for the group. A group that begins before another and ends behind its
        beginning may wait for it, and then does so as a whole.
        """
        begin = self.place[group[0].outputs[0]]
        spans = [(self.place[g[0].outputs[0]], self.place[g[-1].outputs[0]]) for g in self.all.values()]
        for first, last in sorted(spans, reverse=True):
            begin = first if first < begin <= last else begin
        return begin

    def founded(self) -> list[list[Node]]:
        """The groups that have a founder, in the order of the graph."""
        return [group for group in self.all.values() if any(n.op in FOUNDERS for n in group)]


class _Program:
    """The text of one group's program."""

    def __init__(self, view: View, members: list[Node]) -> None:
        self.view = view
        self.members = {node.out: node for node in members}
        users = {out: view.users[out] for out in self.members}
        self.results = [
            out
            for out in self.members
            if out in view.graph.outputs or any(user.outputs[0] not in self.members for user in users[out])
        ]
        self.inputs: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.steps: list[str] = []
        for node in members:
            if not self._inlined(node):
                self.steps.append(self._formula(node) if _pointwise(node) else self._step(node))
                self.names[node.out] = f"v{len(self.steps) - 1}"

    def _inlined(self, node: Node) -> bool:
        """Whether its only reader computes it on the way: elementwise, of its size, reading it once."""
        user = self.view.only_user(node.out)
        return bool(
            user
            and user.outputs[0] in self.members
            and _pointwise(node)
            and _pointwise(user)
            and user.type.shape == node.type.shape
            and user.inputs.count(node.out) == 1
        )

    def _formula(self, node: Node) -> str:
        name = node.attrs.dtype if node.op == "cast" else node.op
        return f"{name}({', '.join(self._operand(value) for value in node.inputs)})"

    def _operand(self, value: str) -> str:
        number = _number(self.view, value)
        if number is not None:
            integer = self.view.types[value].dtype == "i32"
            return str(int(number)) if integer else repr(number).replace("inf", "1e999")  # as graphs print infinity
        node = self.members.get(value)
        return self._formula(node) if node and value not in self.names else self._name(value)

    def _name(self, value: str) -> str:
        """A step's result, or an input."""
        if value in self.names:
            return self.names[value]
        if value not in self.inputs:
            self.inputs[value] = input_name(len(self.inputs), self.view.types[value])
        return self.inputs[value]

    def _step(self, node: Node) -> str:
        a, sizes = node.attrs, ", ".join(map(str, node.type.shape[1:]))
        if node.op in ("reshape", "broadcast"):
            source = self._operand(node.inputs[0]) if node.op == "broadcast" else self._name(node.inputs[0])
            return f"{'fill' if node.op == 'broadcast' else 'reshape'}({', '.join(filter(None, (source, sizes)))})"
        names = [
            self._operand(v) if node.op == "scatter" and i == 2 else self._name(v) for i, v in enumerate(node.inputs)
        ]
        if node.op == "reduce":
            return f"reduce_{a.kind}({names[0]})"
        if node.op == "topk":
            return f"{'topk' if a.largest else 'bottomk'}({names[0]}, {a.k})"
        if node.op == "slice":
            return f"slice({names[0]}, {a.axis % node.type.rank - 1}, {a.start}, {a.stop}, {a.step})"
        return f"{node.op}({', '.join(names)})"


def _number(view: View, value: str) -> float | None:
    """The number that a one-element constant holds, in whatever shape it is read."""
    while view.producers[value].op == "reshape":
        value = view.producers[value].inputs[0]
    return view.scalar(value)


def _pointwise(node: Node) -> bool:
    """Whether each number of the result depends on one number of each operand."""
    return node.op in ELEMENTWISE or node.op == "cast"


def _replace(view: View, edit: Edit, members: list[Node]) -> None:
    """Puts one `rowwise` in the place of the group's last node."""
    program = _Program(view, members)
    attrs = {"steps": tuple(program.steps), "results": tuple(program.names[out] for out in program.results)}
    types = [view.types[name] for name in program.inputs]
    for node in members[:-1]:
        edit.swap(node)
    like = next(n for n in members if n.op in FOUNDERS)
    edit.swap(members[-1], edit.make("rowwise", list(program.inputs), types, attrs, like=like, outputs=program.results))
