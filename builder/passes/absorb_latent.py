"""Attention whose keys and values are made from one latent a token reads that latent itself: latent attention in its
absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). The latent is cached, not the heads made from it.

Comes in: `attention` over keys [T,H,D] that join columns of a linear of some c [T,L] with a part k [T,R] that all heads
share, and values [T,H,V] that are columns of a linear of the same c. Goes out, by head h with its parts K, V of the two
weights: scores (q_h K_h).c + q'_h.k, results (sum of weighted c) V_h. Must not know: families; norms and rotations,
which `fuse_latent_cache` moves in.

    head_linear(q, K) -> queries in latent space    latent_cache(q', c, k) -> q' and the cache's row [c, k]
    latent_attention(both) -> a mean of latents     head_linear(mean, V) -> the result
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.cut import picked
from llmc.builder.weights.recipe import Matrices, Recipe, Swap
from llmc.plugins.paged_attention import Scoring


@dataclass(frozen=True)
class _Columns:
    """Columns start:stop of each head's `width` columns of a linear's output."""

    linear: Node
    width: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Latent:
    """An attention's parts: `keys` and `values` of the latent c, and the shared key part, which is `shared` [T,1,R] and
    stands in columns `place`:`place` + R of a head's key; the keys' columns begin at `begin`.
    """

    keys: _Columns
    values: _Columns
    shared: str
    begin: int
    place: int


def absorb_latent(graph: Graph) -> tuple[Graph, PassReport]:
    """Rewrites every such attention; notes, with the reason, each that keeps its expanded heads in the cache."""
    view, edit = View(graph), Edit(graph)
    matched, missed, notes = [], [], []
    for node in graph:
        found = _latent(view, node) if node.op == "attention" else None
        if found is None:
            continue
        reason = _obstacle(view, node, found)
        if reason is None:
            edit.swap(node, *_absorbed(view, edit, node, found))
            matched.append(node.path)
        else:
            missed.append(node.path)
            notes.append(f"attention @{node.path}: the cache holds heads expanded from their latent: {reason}")
    after = edit.finish()
    # Those with a reason are named by it, and may stand beside layers that are absorbed.
    done = report_places("absorb_latent", graph, after, matched, missed, missed)
    return after, PassReport(**{**vars(done), "notes": tuple(notes)})


def _latent(view: View, node: Node) -> _Latent | None:
    """The parts of an attention over a latent; None for any other."""
    k, v = node.inputs[1:3]
    values, joined = _columns(view, v), view.producer(k, "concat")
    if values is None or joined is None or joined.attrs.axis not in (-1, 2) or len(joined.inputs) != 2:
        return None
    first, second = joined.inputs
    split = size_of(view.types[first].shape[2])
    for made, shared, begin, place in ((first, second, 0, split), (second, first, split, 0)):
        keys, wide = _columns(view, made), view.producer(shared, "broadcast")
        if keys is None or wide is None or keys.linear.inputs[0] != values.linear.inputs[0]:
            continue
        narrow = view.types[wide.inputs[0]]
        if narrow == TensorType("f32", ("T", 1, size_of(wide.type.shape[2]))):
            return _Latent(keys, values, wide.inputs[0], begin, place)
    return None


def _columns(view: View, value: str) -> _Columns | None:
    """The columns of a linear's output that a [T,H,n] value is, the same of each head."""
    node = view.producers[value]
    cut = node if node.op == "slice" else None
    if cut and (cut.attrs.axis not in (-1, 2) or cut.attrs.step != 1):
        return None
    apart = view.producer(cut.inputs[0], "reshape") if cut else view.producer(value, "reshape")
    linear = view.producer(apart.inputs[0], "linear") if apart else None
    if apart is None or linear is None or apart.type.rank != 3:
        return None
    width = size_of(apart.type.shape[2])
    return _Columns(linear, width, *((cut.attrs.start, cut.attrs.stop) if cut else (0, width)))


def _obstacle(view: View, node: Node, found: _Latent) -> str | None:
    """Why an attention over a latent cannot be absorbed, or None."""
    a, heads = node.attrs, size_of(node.type.shape[1])
    latent = size_of(view.types[found.keys.linear.inputs[0]].shape[1])
    row = latent + size_of(view.types[found.shared].shape[2])
    if a.kv_heads != heads:
        return f"{heads} query heads share {a.kv_heads} key heads"
    changed = [f.name for f in fields(Scoring) if f.name != "scale" and getattr(a, f.name) != f.default]
    if changed:
        return f"its scores have {', '.join(changed)}"
    if any(c.linear.attrs.bias for c in (found.keys, found.values)):
        return "the linear that expands the latent has a bias"
    if any(weight_recipe(view, c.linear.inputs[1]) is None for c in (found.keys, found.values)):
        return "the matrix that expands the latent is computed at run time"
    if row >= heads * (a.head_dim + a.v_dim):
        return f"a row of {row} columns is no less than {heads} heads' keys and values"
    return None


def _weight(view: View, columns: _Columns, heads: int) -> Recipe:
    """The rows of a linear's weight that make these columns, by head: [H, stop - start, L]."""
    recipe = weight_recipe(view, columns.linear.inputs[1])
    assert recipe is not None
    rows = [h * columns.width + i for h in range(heads) for i in range(columns.start, columns.stop)]
    return Matrices(picked(recipe, rows), columns.stop - columns.start)


def _absorbed(view: View, edit: Edit, node: Node, found: _Latent) -> list[Node]:
    heads, c = size_of(node.type.shape[1]), found.keys.linear.inputs[0]
    latent, rope = size_of(view.types[c].shape[1]), size_of(view.types[found.shared].shape[2])
    depth, out = found.keys.stop - found.keys.start, found.values.stop - found.values.start
    to_latent = edit.param(
        Swap(_weight(view, found.keys, heads), 1, 2), TensorType("f32", (heads, latent, depth)), found.keys.linear
    )
    from_latent = edit.param(
        _weight(view, found.values, heads), TensorType("f32", (heads, out, latent)), found.values.linear
    )
    made: list[Node] = []

    def emit(op: str, inputs: list[tuple[str, TensorType]], stem: str = "", **attrs: object) -> tuple[str, TensorType]:
        names, types = [name for name, _ in inputs], [kind for _, kind in inputs]
        made.append(edit.make(op, names, types, attrs, like=node, stem=stem))
        return made[-1].out, made[-1].type

    def part(begin: int, width: int) -> tuple[tuple[str, TensorType], int]:
        """Columns of each head's query as a matrix [T, H * S], and where they begin in a head's S."""
        source, start = _query_part(view, node.inputs[0], begin, width)
        apart = view.producer(source, "reshape")
        if apart and view.types[apart.inputs[0]].rank == 2:
            return (apart.inputs[0], view.types[apart.inputs[0]]), start
        value = (source, view.types[source])
        if size_of(value[1].shape[2]) != width:
            value = emit("slice", [value], axis=2, start=start, stop=start + width, step=1)
        return emit("reshape", [value], source, shape=("T", heads * width)), 0

    shape = {"layer": node.attrs.layer, "heads": heads, "latent": latent, "rope": rope}
    query, start = part(found.begin, depth)
    queries = emit("head_linear", [query, (to_latent.out, to_latent.type)], "latent.query", start=start)
    turned, start = part(found.place, rope)
    key = emit("reshape", [(found.shared, view.types[found.shared])], found.shared, shape=("T", rope))
    ropes = emit("latent_cache", [turned, (c, view.types[c]), key], "latent.rope", q_start=start, **shape)
    mean = emit("latent_attention", [queries, ropes], "latent.mean", scale=node.attrs.scale, **shape)
    result = emit("head_linear", [mean, (from_latent.out, from_latent.type)], "latent.heads")
    back = {"shape": node.type.shape}
    made.append(edit.make("reshape", [result[0]], [result[1]], back, like=node, outputs=node.outputs))
    return made


def _query_part(view: View, query: str, begin: int, width: int) -> tuple[str, int]:
    """The [T,H,S] value that columns begin:begin + width of each head's query come from, and where they begin there."""
    node = view.producers[query]
    if node.op == "concat" and node.attrs.axis in (-1, 2):
        first = 0
        for name in node.inputs:
            size = size_of(view.types[name].shape[2])
            if first <= begin and begin + width <= first + size:
                return _query_part(view, name, begin - first, width)
            first += size
    if node.op == "slice" and node.attrs.axis in (-1, 2) and node.attrs.step == 1:
        return _query_part(view, node.inputs[0], begin + node.attrs.start, width)
    return query, begin
