"""What experts compute between their two matrices becomes part of the first: gate, up and activation as one formula.

Comes in: `grouped_linear`, slices of its last axis, elementwise primitives. Goes out: `grouped_linear` with a formula,
its weight in the order gate rows, up rows, whatever order (halves, interleaved) they are stored in. Must not know:
families, precisions, ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.recipe import Concat, Every, Recipe, sliced
from llmc.plugins.pointwise.functions import ELEMENTWISE

Cut = tuple[int, int, int]


def fuse_experts(graph: Graph) -> tuple[Graph, PassReport]:
    """Fuses what leads from one `grouped_linear` to the next, where that is a formula of two parts of it, or of all."""
    view, edit = View(graph), Edit(graph)
    matched: list[str] = []
    missed: list[str] = []
    for node in graph:
        if node.op != "grouped_linear" or view.types[node.inputs[0]].rank != 3:
            continue
        last = view.producers[node.inputs[0]]
        if last.op not in ELEMENTWISE:
            continue
        fused = _fused(view, edit, last)
        if fused:
            edit.swap(last, fused)
        (matched if fused else missed).append(node.path)
    after = edit.finish()
    return after, report_places("fuse_experts", graph, after, matched, missed)


@dataclass
class _Formula:
    """A tree of elementwise nodes as an expression. `parts`: the start:stop:step of the last axis of each thing that it
    reads, by the name that this has in the expression; `sources`: what those are parts of.
    """

    view: View
    parts: dict[Cut, str] = field(default_factory=dict)
    sources: dict[str, Node] = field(default_factory=dict)

    def text(self, value: str) -> str:
        """The expression of a value."""
        node, number = self.view.producers[value], self.view.scalar(value)
        if number is not None:
            return repr(number)
        if node.op in ELEMENTWISE:
            return f"{node.op}({', '.join(self.text(name) for name in node.inputs)})"
        return self._part(node)

    def _part(self, node: Node) -> str:
        rank, cut = len(node.types[0].shape), None
        if node.op == "slice" and node.attrs.axis % rank == rank - 1:
            cut = (node.attrs.start, node.attrs.stop, node.attrs.step)
            node = self.view.producers[node.inputs[0]]
        self.sources[node.outputs[0]] = node
        width = node.types[0].shape[-1] if rank else 1
        return self.parts.setdefault(cut or (0, size_of(width), 1), f"i{len(self.parts)}")

    def in_order(self, expr: str) -> tuple[str, list[Cut]]:
        """The expression with parts numbered by where they start, and those parts."""
        cuts = sorted(self.parts)
        names = {self.parts[cut]: f"i{number}" for number, cut in enumerate(cuts)}
        return re.sub(r"\bi\d+\b", lambda m: names[m[0]], expr), cuts


def _fused(view: View, edit: Edit, last: Node) -> Node | None:
    """The source of `last` computing all that leads there, in its place; None where it cannot."""
    found = _Formula(view)
    expr, cuts = found.in_order(found.text(last.out))
    source = next(iter(found.sources.values()))
    if len(found.sources) != 1 or source.op != "grouped_linear" or source.attrs.expr != "i0" or source.attrs.combine:
        return None
    total = size_of(source.type.shape[-1])
    covered = sorted(entry for cut in cuts for entry in range(*cut)) == list(range(total))
    if not covered or len(cuts) > 2 or last.type.shape[-1] != total // len(cuts) or not _only_here(view, source, last):
        return None
    inputs, types = list(source.inputs[:2]), [view.types[name] for name in source.inputs[:2]]
    for name in source.inputs[2:]:
        recipe, kind = weight_recipe(view, name), view.types[name]
        if recipe is None:
            return None
        if any(step != 1 for _, _, step in cuts):  # not stored in the order in which the kernel wants them
            name = edit.param(Concat(1, tuple(_rows(recipe, cut, total) for cut in cuts)), kind, source).out
        inputs.append(name)
        types.append(kind)
    attrs = vars(source.attrs) | {"gated": len(cuts) == 2, "expr": expr}
    return edit.make("grouped_linear", inputs, types, attrs, like=source, outputs=last.outputs)


def _only_here(view: View, source: Node, last: Node) -> bool:
    """Whether what is computed from `source` on the way to `last` is read by nothing else."""
    seen: set[str] = set()
    wanted = [source.out]
    while wanted:
        name = wanted.pop()
        users = view.users[name]
        if name in view.graph.outputs or any(u.op not in ELEMENTWISE and u.op != "slice" for u in users):
            return False
        new = {u.out for u in users if u is not last} - seen
        seen |= new
        wanted += new
    return True


def _rows(recipe: Recipe, cut: Cut, total: int) -> Recipe:
    """Rows start:stop:step of the `total` rows of each matrix (or bias) of a stack."""
    start, stop, step = cut
    if step == 1:
        return sliced(recipe, 1, start, stop, rank=3)
    return Every(recipe if stop == total else sliced(recipe, 1, 0, stop, rank=3), 1, start, step)
