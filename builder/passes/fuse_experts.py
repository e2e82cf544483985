"""What experts compute between their two matrices becomes part of the first: gate, up and activation as one formula.

Comes in: `grouped_linear`, slices of its last axis, elementwise primitives. Goes out: `grouped_linear` with a formula,
its weight in the order gate rows, up rows, however these are stored (halves, interleaved, apart). Must not know:
families, precisions, ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.cut import sliced
from llmc.builder.weights.recipe import Concat, Every, Recipe
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
        if last.op not in ELEMENTWISE or not _from_experts(view, last):
            continue
        fused = _fused(view, edit, last)
        if fused:
            edit.swap(last, fused)
        (matched if fused else missed).append(node.path)
    after = edit.finish()
    return after, report_places("fuse_experts", graph, after, matched, missed)


@dataclass
class _Formula:
    """A tree of elementwise nodes as an expression. `parts`: what it reads (of which value which start:stop:step of the
    last axis), and the name that this has in the expression.
    """

    view: View
    parts: dict[tuple[str, Cut], str] = field(default_factory=dict)

    def text(self, value: str) -> str:
        """The expression of a value."""
        node, number = self.view.producers[value], self.view.scalar(value)
        if number is not None:
            return repr(number)
        if node.op in ELEMENTWISE:
            return f"{node.op}({', '.join(self.text(name) for name in node.inputs)})"
        return self._part(node, value)

    def _part(self, node: Node, value: str) -> str:
        kind, cut = self.view.types[value], None
        if node.op == "slice" and node.attrs.axis % kind.rank == kind.rank - 1:
            cut = (node.attrs.start, node.attrs.stop, node.attrs.step)
            value = node.inputs[0]
        whole = (0, size_of(kind.shape[-1]) if kind.rank else 1, 1)
        return self.parts.setdefault((value, cut or whole), f"i{len(self.parts)}")

    def in_order(self, expr: str) -> tuple[str, dict[str, list[Cut]]]:
        """The expression with parts numbered by value, then by where they start, and the parts of each value."""
        cuts: dict[str, list[Cut]] = {}
        for value, cut in self.parts:
            cuts[value] = sorted([*cuts.get(value, []), cut])
        numbered = [(value, cut) for value in cuts for cut in cuts[value]]
        names = {self.parts[part]: f"i{number}" for number, part in enumerate(numbered)}
        return re.sub(r"\bi\d+\b", lambda m: names[m[0]], expr), cuts


def _fused(view: View, edit: Edit, last: Node) -> Node | None:
    """What leads to `last` from one `grouped_linear`, or from two of the same rows, as one in its place; None where it
    cannot be.
    """
    found = _Formula(view)
    expr, parts = found.in_order(found.text(last.out))
    sources = [view.producers[value] for value in parts]
    first = sources[0]
    if not all(_alike(first, source) and _only_here(view, source, last) for source in sources):
        return None
    cuts = [cut for value in parts for cut in parts[value]]
    if len(cuts) > 2 or any(len(range(*cut)) != last.type.shape[-1] for cut in cuts) or not _covered(view, parts):
        return None
    inputs, types = list(first.inputs[:2]), [view.types[name] for name in first.inputs[:2]]
    for position in range(2, len(first.inputs)):
        name = _joined(view, edit, sources, position, list(parts.values()))
        if name is None:
            return None
        inputs.append(name.out)
        types.append(name.type)
    attrs = vars(first.attrs) | {"gated": len(cuts) == 2, "expr": expr}
    return edit.make("grouped_linear", inputs, types, attrs, like=first, outputs=last.outputs)


def _from_experts(view: View, last: Node) -> bool:
    """Whether a formula reads what experts computed: one that makes the first rows of experts is none of theirs."""
    found = _Formula(view)
    found.text(last.out)
    return any(view.producers[value].op == "grouped_linear" for value, _ in found.parts)


def _alike(first: Node, other: Node) -> bool:
    """Whether one kernel call can compute both, and nothing is fused into them yet."""
    return (
        other.op == "grouped_linear"
        and (other.inputs[:2], other.attrs) == (first.inputs[:2], first.attrs)
        and other.attrs.expr == "i0"
        and not other.attrs.combine
    )


def _covered(view: View, parts: dict[str, list[Cut]]) -> bool:
    """Whether each value is read whole."""
    return all(
        sorted(entry for cut in cuts for entry in range(*cut)) == list(range(size_of(view.types[value].shape[-1])))
        for value, cuts in parts.items()
    )


def _joined(view: View, edit: Edit, sources: list[Node], position: int, cuts: list[list[Cut]]) -> Node | None:
    """The weights (or biases) of all sources as one, in the order in which the kernel wants their rows."""
    pieces: list[Recipe] = []
    kinds = [view.types[source.inputs[position]] for source in sources]
    for source, kind, own in zip(sources, kinds, cuts, strict=True):
        recipe = weight_recipe(view, source.inputs[position])
        if recipe is None:
            return None
        if all(step == 1 for _, _, step in own):
            pieces.append(recipe)  # the parts lie side by side
        else:
            pieces += [_rows(recipe, cut, size_of(kind.shape[1])) for cut in own]
    if len(pieces) == 1:
        return view.producers[sources[0].inputs[position]]
    rows = sum(size_of(kind.shape[1]) for kind in kinds)
    kind = TensorType(kinds[0].dtype, (kinds[0].shape[0], rows, *kinds[0].shape[2:]))
    return edit.param(Concat(1, tuple(pieces)), kind, sources[0])


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
