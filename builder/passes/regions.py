"""Which values of a graph can have their columns divided among ranks, and where the cuts lie.

Comes in: a graph before merges. Goes out: `Regions`: for each value and rank an `Extent` of columns, or None (whole).
Must not know: families, recipes.

A region is a set of values of one width that elementwise nodes tie together: a cut through one is a cut through all.
It can be divided if every value in it is made by a linear layer (of heads or of all), by attention or elementwise, and
is read by a linear layer, by attention (as query, key or value), elementwise, or returned. Any other maker or reader
needs it whole. Keys and values that ranks have in common (more ranks than KV heads) must be read by attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Node
from llmc.builder.passes.rewrite import View, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.plugins.cpu.call import PANEL
from llmc.plugins.pointwise.functions import ELEMENTWISE


@dataclass(frozen=True)
class Extent:
    """Entries start:stop of an axis."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, factor: int) -> Extent:
        """The same run, counted in entries that are `factor` times smaller."""
        return Extent(self.start * factor, self.stop * factor)


@dataclass(frozen=True)
class Heads:
    """One rank's query heads and KV heads."""

    query: Extent
    kv: Extent


def divide(count: int, tp: int) -> tuple[Extent, ...]:
    """`count` things in `tp` runs whose lengths differ by at most one; the first runs are the longer."""
    base, extra = divmod(count, tp)
    stops = [base * (rank + 1) + min(rank + 1, extra) for rank in range(tp)]
    return tuple(Extent(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))


def divide_heads(heads: int, kv_heads: int, tp: int) -> tuple[Heads, ...]:
    """Each rank's heads: runs of KV heads with their query heads; where ranks are more than KV heads, one KV head for
    several ranks, each with some of its query heads. Needs as many query heads as ranks.
    """
    group = heads // kv_heads
    if tp <= kv_heads:
        return tuple(Heads(kv.times(group), kv) for kv in divide(kv_heads, tp))
    found = []
    for head, ranks in enumerate(divide(tp, kv_heads)):
        for run in divide(group, len(ranks)):
            query = Extent(head * group + run.start, head * group + run.stop)
            found.append(Heads(query, Extent(head, head + 1)))
    return tuple(found)


def divide_columns(width: int, tp: int) -> tuple[Extent, ...] | None:
    """`width` columns in runs of whole panels, or of smaller powers of two; None where there are fewer than tp."""
    granule = PANEL
    while granule > 1 and -(-width // granule) < tp:
        granule //= 2
    if width < tp:
        return None
    runs = divide(-(-width // granule), tp)
    return tuple(Extent(run.start * granule, min(run.stop * granule, width)) for run in runs)


class Regions:
    """The division of one graph among `tp` ranks."""

    def __init__(self, view: View, tp: int) -> None:
        self.view, self.tp = view, tp
        self._parent: dict[str, str] = {}
        self._whole: set[str] = set()  # roots of regions that cannot be divided
        self._extents: dict[str, tuple[Extent, ...]] = {}  # root -> columns by rank
        for node in view.graph:
            self._tie(node)
        self._linears = [n for n in view.graph if n.op == "linear"]
        for node in view.graph:
            self._judge(node)
        self._assign()

    def divides(self, value: str) -> bool:
        """Whether each rank has some columns of the value."""
        return self._root(value) in self._extents

    def extent(self, value: str, rank: int) -> Extent | None:
        """The columns of `value` that a rank has, or None where it has all."""
        extents = self._extents.get(self._root(value))
        return extents[rank] if extents else None

    def heads(self, cache: Node, rank: int) -> Heads | None:
        """A rank's heads of a `rope_cache` and of the attention that reads it; None where every rank has all."""
        if not self._attention_divides(cache):
            return None
        return divide_heads(cache.attrs.heads, cache.attrs.kv_heads, self.tp)[rank]

    def columns_of_heads(self, value: str, rank: int, heads: int) -> Extent | None:
        """A rank's heads of a value [T, heads * S], or None where it has all."""
        extent = self.extent(value, rank)
        width = size_of(self.view.types[value].shape[1]) // heads
        return Extent(extent.start // width, extent.stop // width) if extent else None

    def _attention_divides(self, cache: Node) -> bool:
        paged = self.view.only_user(cache.out)
        return paged is not None and paged.op == "paged_attention" and self.divides(paged.out)

    def _root(self, value: str) -> str:
        while self._parent.get(value, value) != value:
            value = self._parent[value]
        return value

    def _tie(self, node: Node) -> None:
        """Joins the operands of an elementwise node that have its columns with its output."""
        if node.op in ELEMENTWISE:
            for name in node.inputs:
                if self._full(name, node.type):
                    self._parent[self._root(name)] = self._root(node.out)

    def _full(self, name: str, kind: TensorType) -> bool:
        """Whether an operand varies along the rows and columns of an elementwise result (weights do not)."""
        return self.view.types[name] == kind and weight_recipe(self.view, name) is None

    def _judge(self, node: Node) -> None:
        """Marks the regions of the values that this node makes or reads in a way that needs them whole."""
        if node.op == "grouped_linear":
            bad = list(node.inputs[1:2] + node.inputs[-1:]) if node.attrs.combine else list(node.inputs[:2])
            bad += node.outputs if node.attrs.combine or not self._weights_known(node) else ()
        elif node.op in ("linear", "paged_attention", "head_linear", "latent_attention"):
            bad = [] if self._weights_known(node) else [*node.outputs, *node.inputs]
        elif node.op == "rope_cache":
            bad = list(node.outputs) + list(node.inputs[3:])
            bad += [] if self._weights_known(node) else node.inputs[:3]
        elif node.op == "latent_cache":
            bad = list(node.inputs[1:])  # what all heads share
        elif node.op in ELEMENTWISE and node.type.rank == 2:
            bad = [name for name in node.inputs if not self._full(name, node.type)]
            if any(not self._sliceable(name, node.type) for name in bad):
                bad.append(node.out)
        else:
            bad = [*node.outputs, *node.inputs]
        self._whole |= {self._root(name) for name in bad}

    def _weights_known(self, node: Node) -> bool:
        """Whether a rank can take its part of all that is neither the step's values nor tables of positions."""
        known = {"linear": 1, "head_linear": 1, "paged_attention": 1, "grouped_linear": 2, "rope_cache": 3}
        first = known.get(node.op, len(node.inputs)) + 2 * bool(getattr(node.attrs, "rotary", 0))
        weights = node.inputs[first:]
        if node.op == "grouped_linear" and node.attrs.combine:
            weights = weights[:-1]
        return all(weight_recipe(self.view, name) is not None for name in weights)

    def _sliceable(self, name: str, kind: TensorType) -> bool:
        """Whether a rank can take its columns of a broadcast operand: a scalar, one column, or a weight."""
        own = self.view.types[name]
        return not own.shape or own.shape[-1] == 1 or weight_recipe(self.view, name) is not None

    def _assign(self) -> None:
        """Attention cuts its regions at heads, and only there; the other regions are cut in panels."""
        caches = [n for n in self.view.graph if n.op == "rope_cache"]
        for cache in caches:
            self._assign_heads(cache)
        for node in self.view.graph:
            if node.op == "latent_attention":
                self._assign_latent(node)
        for linear in self._linears:
            root = self._root(linear.out)
            if root not in self._whole and root not in self._extents and self._worthwhile(root):
                extents = divide_columns(size_of(linear.type.shape[-1]), self.tp)
                if extents:
                    self._extents[root] = extents
        self._assign_experts()

    def _assign_experts(self) -> None:
        """The columns between the two matrices of experts, where nothing but the second of them reads the first."""
        for node in self.view.graph:
            first = self.view.producers[node.inputs[0]] if node.op == "grouped_linear" else None
            if first is None or first.op != "grouped_linear" or not node.attrs.combine:
                continue
            root = self._root(first.out)
            extents = divide_columns(size_of(first.type.shape[-1]), self.tp)
            if extents and root not in self._whole and self._weights_known(node) and self.view.only_user(first.out):
                self._extents[root] = extents

    def _worthwhile(self, root: str) -> bool:
        """Whether a linear reads the region or it is returned, and no linear would be divided both in and out."""
        makers = [n for n in self._linears if self._root(n.out) == root]
        readers = [n for n in self._linears if self._root(n.inputs[0]) == root]
        if any(self.divides(n.inputs[0]) for n in makers) or any(self.divides(n.out) for n in readers):
            return False
        return bool(readers) or any(self._root(o) == root for o in self.view.graph.outputs)

    def _assign_heads(self, cache: Node) -> None:
        paged = self.view.only_user(cache.out)
        a = cache.attrs
        heads = divide_heads(a.heads, a.kv_heads, self.tp)
        query, key = ([e.times(a.head_dim) for e in es] for es in zip(*((h.query, h.kv) for h in heads), strict=True))
        value = [h.kv.times(a.value_dim) for h in heads]
        attended = [h.query.times(a.value_dim) for h in heads]
        inputs = list(zip(cache.inputs[:3], (query, key, value), strict=True))
        root = self._root(paged.out) if paged and paged.op == "paged_attention" else None
        if root is None or root in self._whole:
            self._whole |= {self._root(name) for name, _ in inputs}  # attention runs whole, so its inputs do
            return
        self._cut_at_heads(cache.path, [(root, attended), *inputs])

    def _cut_at_heads(self, path: str, regions: Sequence[tuple[str, Sequence[Extent]]]) -> None:
        for name, extents in regions:
            mine = self._root(name)
            if any(a.stop > b.start for a, b in pairwise(extents)) and not self._only_attended(mine):
                self._whole.add(mine)
            if mine not in self._whole and self._extents.setdefault(mine, tuple(extents)) != tuple(extents):
                raise UnsupportedError(f"{path}: %{name} is already divided in another way; only tp 1 works")

    def _only_attended(self, root: str) -> bool:
        """Whether nothing but attention reads the region: of columns that ranks have in common, neither the sum over
        ranks nor what is returned would be right.
        """
        if any(self._root(name) == root for name in self.view.graph.outputs):
            return False
        readers = [node for node in self.view.graph if any(self._root(name) == root for name in node.inputs)]
        return all(node.op == "rope_cache" or self._root(node.outputs[0]) == root for node in readers)

    def _assign_latent(self, node: Node) -> None:
        """Each rank has some heads of the queries and of the results; the cached latent is everybody's."""
        heads = divide(node.attrs.heads, self.tp)
        out = self.view.only_user(node.out)
        made = [self.view.producers[name] for name in node.inputs]
        queries = [node.inputs[0], *(maker.inputs[0] for maker in made if maker.op in ("head_linear", "latent_cache"))]
        values = [*node.inputs, node.out, *queries, *(out.outputs if out else ())]
        if out is None or out.op != "head_linear" or self._root(out.out) in self._whole:
            self._whole |= {self._root(name) for name in values}
            return
        widths = [size_of(self.view.types[name].shape[1]) // node.attrs.heads for name in values]
        cuts = [(name, [e.times(width) for e in heads]) for name, width in zip(values, widths, strict=True)]
        self._cut_at_heads(node.path, cuts)
