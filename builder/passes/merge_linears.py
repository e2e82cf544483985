"""Linear layers that read the same input become one, whose output is cut by views.

Comes in: separate (sharded) linears. Goes out: `merge_qkv` joins those that feed one `rope_cache`, `merge_latent` those
that feed one `latent_cache`, `merge_gate_up` those of a gated product act(gate) * up, each as far as they are of one
precision. Must not know: ranks; each rank's pieces are joined as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmc.artifacts.schema import PassReport
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.rewrite import Edit, View, report_places, size_of
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.weights.recipe import Concat
from llmc.plugins.linear import ACTIVATIONS, FACTORS
from llmc.plugins.pointwise.functions import ELEMENTWISE


def merge_qkv(graph: Graph) -> tuple[Graph, PassReport]:
    """Joins the query, key and value projections of each attention layer."""
    view = View(graph)
    places = [(n.path, [_linear(view, name) for name in n.inputs[:3]]) for n in graph if n.op == "rope_cache"]
    return _merge("merge_qkv", view, places)


def merge_latent(graph: Graph) -> tuple[Graph, PassReport]:
    """Joins the linears that make a layer's latent, its shared key part and its query (or the query's own latent)."""
    view, places = View(graph), []
    for node in graph:
        if node.op == "latent_cache":
            query, latent, key = (_behind(view, name) for name in node.inputs[:3])
            if query and latent and query.inputs[0] != latent.inputs[0]:
                query = _behind(view, query.inputs[0])  # the query has a low rank as well
            places.append((node.path, [query, latent, key]))
    return _merge("merge_latent", view, places)


def _behind(view: View, value: str) -> Node | None:
    """The one linear that a value comes from, by way of norms, elementwise operators and reshapes."""
    node = view.producers[value]
    if node.op == "linear":
        return node
    if node.op not in ("rms_norm", "reshape", *ELEMENTWISE):
        return None
    found = [made for name in node.inputs if weight_recipe(view, name) is None and (made := _behind(view, name))]
    return found[0] if len(found) == 1 else None


def merge_gate_up(graph: Graph) -> tuple[Graph, PassReport]:
    """Joins gate and up of each gated product, gate first."""
    view = View(graph)
    places, others = [], []
    for node in graph:
        found = gated_product(view, node)
        if found:
            gate, up, _ = found
            places.append((node.path, [_linear(view, gate), _linear(view, up)]))
            others += [node.path] if of_whole_rows(view, gate) else []
    return _merge("merge_gate_up", view, [p for p in places if any(p[1]) and p[0] not in others], others)


def gated_product(view: View, node: Node) -> tuple[str, str, Node] | None:
    """(gate before its activation, up, the activation) where the node is act(gate) * up."""
    if node.op != "mul" or len({view.types[name] for name in node.inputs}) != 1:
        return None
    for acted, up in (node.inputs, node.inputs[::-1]):
        activation = view.producer(acted, *ACTIVATIONS)
        if activation and view.only_user(acted) is node and activation.inputs[0] != up:
            return activation.inputs[0], up, activation
    return None


def of_whole_rows(view: View, value: str) -> bool:
    """Whether something about its whole row is in each number of a value, as where a layer keeps only the largest of
    each row: no epilogue computes that, also where layers with the same tensors do without.
    """
    node = view.producers[value]
    if node.op == "reduce":
        return True
    return node.op in ELEMENTWISE and any(of_whole_rows(view, name) for name in node.inputs)


def _linear(view: View, value: str) -> Node | None:
    """The linear that makes the value, for one reader or for those of queries and keys, which follow row strides."""
    node = view.producer(value, "linear")
    if node is None or node.attrs.all_reduce or value in view.graph.outputs:
        return None
    alone = view.only_user(value) or all(user.op in ("rope_cache", "mean_squares") for user in view.users[value])
    return node if alone else None


def _merge(
    name: str, view: View, places: Sequence[tuple[str, Sequence[Node | None]]], others: Sequence[str] = ()
) -> tuple[Graph, PassReport]:
    edit = Edit(view.graph)
    matched, missed = [], []
    for path, found in places:
        linears = list({n.out: n for n in found if n}.values())  # one that makes keys and values alike stands once
        if all(found) and _alike(view, linears):
            for group in _by_precision(view, linears):
                if len(group) > 1:
                    edit.before(group[0], *_join(view, edit, group))
            matched.append(path)
        else:
            missed.append(path)
    after = edit.finish()
    return after, report_places(name, view.graph, after, matched, missed, others)


def _alike(view: View, linears: Sequence[Node]) -> bool:
    """Whether one kernel call can compute them, but for their precision: same input, all or none with bias and
    epilogue.
    """
    first, *others = linears
    same = ("bias", "epilogue", "all_reduce")
    return all(
        n.inputs[0] == first.inputs[0] and all(getattr(n.attrs, key) == getattr(first.attrs, key) for key in same)
        for n in others
    ) and all(weight_recipe(view, w) is not None for n in linears for w in n.inputs[1:])


def _by_precision(view: View, linears: Sequence[Node]) -> list[list[Node]]:
    """Those of one precision together: what calibration keeps in bf16 has a kernel call of its own."""
    groups: dict[object, list[Node]] = {}
    for node in linears:
        factors = weight_recipe(view, node.inputs[FACTORS]) if node.attrs.x_factors else None
        key = (view.types[node.inputs[1]].dtype, node.attrs.x_per_token, node.attrs.x_scale is None, factors)
        groups.setdefault(key, []).append(node)
    return list(groups.values())


def _join(view: View, edit: Edit, linears: Sequence[Node]) -> list[Node]:
    """The joined linear and the slices that take over the old outputs. The largest static x_scale covers all."""
    first = linears[0]
    inputs, types = [first.inputs[0]], [view.types[first.inputs[0]]]
    for position in range(1, len(first.inputs)):
        names = [n.inputs[position] for n in linears]
        if first.attrs.x_factors and position == FACTORS:  # of their common input
            inputs.append(names[0])
            types.append(view.types[names[0]])
            continue
        recipes = tuple(r for name in names if (r := weight_recipe(view, name)) is not None)
        kinds = [view.types[name] for name in names]
        rows = sum(size_of(k.shape[0]) for k in kinds)
        weight = edit.param(Concat(0, recipes), TensorType(kinds[0].dtype, (rows, *kinds[0].shape[1:])), first)
        inputs.append(weight.out)
        types.append(weight.type)
    scales = [n.attrs.x_scale for n in linears if n.attrs.x_scale is not None]
    attrs = vars(first.attrs) | {"x_scale": max(scales) if scales else None}
    joined = edit.make("linear", inputs, types, attrs, like=first)
    nodes, start = [joined.replace(path=_common(n.path for n in linears))], 0
    for node in linears:
        stop = start + size_of(node.type.shape[1])
        cut = {"axis": 1, "start": start, "stop": stop, "step": 1}
        nodes.append(edit.make("slice", [joined.out], [joined.type], cut, like=node))
        edit.rename(node.out, nodes[-1].out)
        start = stop
    return nodes


def _common(paths: Iterable[str]) -> str:
    """`a.b.q_proj` and `a.b.k_proj` -> `a.b`; one path for all -> that path."""
    parts = [path.split(".") for path in paths]
    same = 0
    while all(len(p) > same and p[same] == parts[0][same] for p in parts):
        same += 1
    return ".".join(parts[0][:same])
