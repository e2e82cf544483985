"""Tensor parallelism: one graph for each rank, in which weights are slices and sums over ranks are marked.

Comes in: a graph with `rope_cache` and `paged_attention`, before merges. Goes out: `tp` graphs. Must not know: model
families; what is divided follows from the graph (see `regions.py`). Earlier ranks get the larger shards.

A value whose columns are divided is made by column-parallel linears (rows of the weight) or by attention (heads), and
ends in row-parallel linears (columns of the weight; summed over the ranks), in attention, or as the model's output
(vocabulary). Every rank has some columns of every expert, not some of the experts: all are busy however tokens go.
Everything else is computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import INT4_GROUP, KVScales, TensorType
from llmc.builder.ir import Graph, GraphError, Node
from llmc.builder.operators import ALL
from llmc.builder.passes.regions import Extent, Regions
from llmc.builder.passes.rewrite import Edit, View, report, size_of, tidy
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.cut import sliced
from llmc.builder.weights.recipe import Concat, Recipe


def shard(graph: Graph, tp: int) -> tuple[tuple[Graph, ...], PassReport]:
    """Divides heads and columns among ranks, and gives each its graph. Raises UnsupportedError where tp is larger than
    the query heads (of latent attention: the heads) of an attention layer, GraphError for a graph that is divided
    already.
    """
    if graph.tp != 1:
        raise GraphError(f"{graph.name} is rank {graph.rank} of {graph.tp} already")
    if tp == 1:
        return (graph,), report("shard", graph, graph, 0)
    layers = [node for node in graph if node.op in ("rope_cache", "latent_cache")]
    for node in layers:
        if tp > node.attrs.heads:
            raise UnsupportedError(
                f"tp {tp} is larger than the {node.attrs.heads} query heads of layer {node.attrs.layer} ({node.path}): "
                f"each rank needs one; the largest tp for this model is {min(n.attrs.heads for n in layers)}"
            )
    view = View(graph)
    regions = Regions(view, tp)
    graphs = tuple(_Rank(view, regions, rank, tp).run() for rank in range(tp))
    linears = [n for n in graph if n.op in ("linear", "grouped_linear")]
    whole = [n for n in linears if not regions.divides(n.out) and not regions.divides(n.inputs[0])]
    notes = [f"{n.op} @{n.path}: cannot be divided, every rank computes all of it" for n in whole]
    return graphs, report("shard", graph, graphs[0], len(linears) - len(whole), notes=notes)


class _Rank:
    """The rewriting of one graph for one rank: nodes keep their names, types follow from the operators' rules."""

    def __init__(self, view: View, regions: Regions, rank: int, tp: int) -> None:
        self.view, self.regions, self.rank, self.tp = view, regions, rank, tp
        self.edit = Edit(view.graph)
        self.types: dict[str, TensorType] = {}
        self.nodes: list[Node] = []

    def run(self) -> Graph:
        special = {
            "linear": self._linear,
            "grouped_linear": self._experts,
            "rope_cache": self._rope_cache,
            "paged_attention": self._paged_attention,
            "head_linear": self._head_linear,
            "latent_cache": self._latent,
            "latent_attention": self._latent,
        }
        for node in self.view.graph:
            special.get(node.op, self._any)(node)
        graph = self.view.graph
        return tidy(Graph(graph.name, tuple(self.nodes), graph.outputs, self.rank, self.tp))

    def _emit(self, node: Node, inputs: Sequence[str], **attrs: object) -> None:
        values = type(node.attrs)(**(vars(node.attrs) | attrs))
        try:
            types = tuple(ALL[node.op].infer(values, [self.types[name] for name in inputs])) or node.types
        except ValueError as error:
            raise GraphError(f"{node.op} @{node.path}, rank {self.rank}: {error}") from error
        self.nodes.append(node.replace(inputs=tuple(inputs), attrs=values, types=types))
        self.types |= dict(zip(node.outputs, types, strict=True))

    def _any(self, node: Node) -> None:
        """A node that is computed whole, or elementwise on this rank's columns."""
        extent = self.regions.extent(node.outputs[0], self.rank)
        inputs = [self._columns(name, extent) for name in node.inputs] if extent else node.inputs
        self._emit(node, inputs)

    def _columns(self, name: str, extent: Extent) -> str:
        """This rank's columns of an elementwise operand: itself where it is divided or broadcast, else a slice."""
        kind = self.view.types[name]
        if self.regions.divides(name) or not kind.shape or kind.shape[-1] == 1:
            return name
        return self._weight(name, kind.rank - 1, extent)

    def _weight(self, name: str, axis: int, extent: Extent | None) -> str:
        """A new parameter: entries `extent` of one axis of a weight (all of it, where extent is None)."""
        if extent is None:
            return name
        recipe = weight_recipe(self.view, name)
        assert recipe is not None, f"regions divide %{name}, which is no weight"
        shape = list(self.view.types[name].shape)
        shape[axis] = extent.stop - extent.start
        kind = TensorType(self.types[name].dtype, tuple(shape))
        return self._param(sliced(recipe, axis, extent.start, extent.stop, max(kind.rank, 2)), kind, name)

    def _param(self, recipe: Recipe, kind: TensorType, like: str) -> str:
        made = self.edit.param(recipe, kind, self.view.producers[like])
        self.nodes.append(made)
        self.types[made.out] = kind
        return made.out

    def _linear(self, node: Node) -> None:
        rows = self.regions.extent(node.out, self.rank)
        columns = self.regions.extent(node.inputs[0], self.rank)
        if rows and columns:
            raise UnsupportedError(f"linear @{node.path}: both its input and its output are divided; only tp 1 works")
        x, weight, *others = node.inputs
        start = 0
        if columns and self.view.types[weight].dtype == "u4":
            start, others[:2] = self._group_columns(others[:2], columns)
        cuts = [rows] * len(others)
        if node.attrs.x_factors:
            cuts[1] = columns
        weight = self._weight(weight, 1, columns) if columns else self._weight(weight, 0, rows)
        inputs = [x, weight, *(self._weight(name, 0, cut) for name, cut in zip(others, cuts, strict=True))]
        self._emit(node, inputs, all_reduce=columns is not None, group_start=start)

    def _group_columns(self, names: Sequence[str], columns: Extent) -> tuple[int, list[str]]:
        """The scales and zero points of an INT4 weight's columns, and where in their group these begin. A group that
        the cut divides has them on both sides.
        """
        within = Extent(columns.start // INT4_GROUP, -(-columns.stop // INT4_GROUP))
        return columns.start % INT4_GROUP, [self._weight(n, self.view.types[n].rank - 1, within) for n in names]

    def _experts(self, node: Node) -> None:
        """The first matrices by rows (of gate and of up), the second ones by columns; the bias of their sum once."""
        x, index, *weights = node.inputs
        if rows := self.regions.extent(node.out, self.rank):
            cut = [self._expert_rows(name, rows, node.attrs.gated) for name in weights]
            return self._emit(node, [x, index, *cut])
        columns = self.regions.extent(x, self.rank)
        if columns is None:
            return self._any(node)
        start = 0
        if self.view.types[weights[0]].dtype == "u4":
            start, weights[1:3] = self._group_columns(weights[1:3], columns)
        weights[0] = self._weight(weights[0], 2, columns)
        biased = node.attrs.bias and self.rank == 0
        if node.attrs.bias and not biased:
            del weights[-2]
        return self._emit(node, [x, index, *weights], bias=biased, all_reduce=True, group_start=start)

    def _expert_rows(self, name: str, rows: Extent, gated: bool) -> str:
        """A new parameter: those rows of each expert's matrix (scales, biases), of gate and of up where it has both."""
        recipe, kind = weight_recipe(self.view, name), self.view.types[name]
        assert recipe is not None, f"regions divide %{name}, which is no weight"
        size = int(kind.shape[1]) // (1 + gated)
        sides = tuple(
            sliced(recipe, 1, side * size + rows.start, side * size + rows.stop, rank=3) for side in range(1 + gated)
        )
        shape = (kind.shape[0], len(rows) * len(sides), *kind.shape[2:])
        return self._param(Concat(1, sides) if gated else sides[0], TensorType(kind.dtype, shape), name)

    def _rope_cache(self, node: Node) -> None:
        heads = self.regions.heads(node, self.rank)
        if heads is None:
            return self._any(node)
        a = node.attrs
        columns = [heads.query.times(a.head_dim), heads.kv.times(a.head_dim), heads.kv.times(a.value_dim)]
        inputs = list(node.inputs)
        for position, extent in enumerate(columns):
            if not self.regions.divides(inputs[position]):
                inputs[position] = self._cut(inputs[position], extent)
        if a.norm_scope != "head":  # each head has weights of its own: of q, of k, and so on
            first = 3 + 2 * bool(a.rotary)
            for position in range(first, len(inputs)):
                inputs[position] = self._weight(inputs[position], 0, columns[(position - first) % 2])
        means = a.norm_scope == "all"
        if means:
            inputs.append(self._means(node, inputs[:2]))
        sizes = {"heads": len(heads.query), "kv_heads": len(heads.kv), "kv_scales": _own_scales(node, heads.kv)}
        return self._emit(node, inputs, **sizes, norm_means=means)

    def _means(self, node: Node, values: Sequence[str]) -> str:
        """The mean squares of q and k over the heads of all ranks. Ranks that share a KV head each add their part."""
        a = node.attrs
        if self.tp > a.kv_heads and self.tp % a.kv_heads:
            raise UnsupportedError(
                f"rope_cache @{node.path}: its norm over all heads needs {self.tp} ranks to share {a.kv_heads} KV "
                "heads evenly; choose a tp that is a multiple of them, or no more"
            )
        copies = max(1, self.tp // a.kv_heads)
        widths = (a.heads * a.head_dim, a.kv_heads * a.head_dim * copies)
        types = [self.types[name] for name in values]
        part = self.edit.make("mean_squares", values, types, {"widths": widths}, like=node, stem=f"{node.out}.part")
        total = self.edit.make("all_reduce", [part.out], [part.type], like=node, stem=f"{node.out}.means")
        self.nodes += [part, total]
        self.types |= {part.out: part.type, total.out: total.type}
        return total.out

    def _head_linear(self, node: Node) -> None:
        """This rank's matrices, and their heads' columns of x."""
        total = size_of(self.view.types[node.inputs[1]].shape[0])
        heads = self.regions.columns_of_heads(node.out, self.rank, total)
        if heads is None:
            return self._any(node)
        x = self._own_heads(node.inputs[0], heads, total)
        return self._emit(node, [x, self._weight(node.inputs[1], 0, heads)])

    def _latent(self, node: Node) -> None:
        """This rank's heads; the latent of a `latent_cache` is computed and cached whole on every rank."""
        heads = self.regions.columns_of_heads(node.out, self.rank, node.attrs.heads)
        if heads is None:
            return self._any(node)
        queries = self._own_heads(node.inputs[0], heads, node.attrs.heads)
        return self._emit(node, [queries, *node.inputs[1:]], heads=len(heads))

    def _own_heads(self, name: str, heads: Extent, total: int) -> str:
        """The columns of some of the `total` heads of a value: all that this rank has, or a cut."""
        width = size_of(self.view.types[name].shape[1]) // total
        return name if self.regions.divides(name) else self._cut(name, heads.times(width))

    def _cut(self, name: str, extent: Extent) -> str:
        """This rank's columns of a value that every rank has whole: a view."""
        cut = {"axis": 1, "start": extent.start, "stop": extent.stop, "step": 1}
        made = self.edit.make("slice", [name], [self.types[name]], cut, like=self.view.producers[name], stem=name)
        self.nodes.append(made)
        self.types[made.out] = made.type
        return made.out

    def _paged_attention(self, node: Node) -> None:
        heads = self.regions.heads(self.view.producers[node.inputs[0]], self.rank)
        if heads is None:
            return self._any(node)
        inputs = [node.inputs[0], *(self._weight(name, 0, heads.query) for name in node.inputs[1:])]
        sizes = {"heads": len(heads.query), "kv_heads": len(heads.kv), "kv_scales": _own_scales(node, heads.kv)}
        return self._emit(node, inputs, **sizes)


def _own_scales(node: Node, heads: Extent) -> KVScales | None:
    """What a rank's KV heads are divided by in the cache."""
    if node.attrs.kv_scales is None:
        return None
    keys, values = node.attrs.kv_scales
    return keys[heads.start : heads.stop], values[heads.start : heads.stop]
