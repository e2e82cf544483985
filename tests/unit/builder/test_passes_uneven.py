"""A layer that a pass misses, among others that it matches, stops the build with its name; one built otherwise is fine.

The graph is a pass's golden input three times over, as layers. In one of them a value that the pass looks at is negated
(or transposed) twice on its way: the layer computes what it did, and the pattern is gone.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.ir import LAYER, Graph, Node, layer_of, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.rewrite import Edit, View, report_places
from llmc.builder.pipeline import apply
from tests.golden.goldens import PASSES, before

#: Pass -> the node that is disguised, as operator and path within its layer, and which of its inputs.
SABOTAGE = {
    "split_packed": ("slice", "attn", 0),
    "fold_activations": ("tanh", "act", 0),
    "fuse_rms_norm": ("rsqrt", "norm", 0),
    "fuse_rotary": ("concat", "attn", 0),
    "fuse_qk_norm": ("rope_cache", "attn", 0),
    "merge_qkv": ("linear", "attn.k_proj", 0),
    "merge_gate_up": ("linear", "mlp.up_proj", 0),
    "fuse_activation": ("mul", "mlp", 0),
    "fuse_experts": ("grouped_linear", "experts.down", 0),
    "choose_experts": ("grouped_linear", "experts.down", 0),
    "absorb_latent": ("attention", "attn", 1),
    "fuse_latent_cache": ("latent_cache", "attn", 2),
    "merge_latent": ("linear", "attn.kv_a", 0),
    "fuse_residual_norm": ("layer_norm", "norm", 0),
    "fuse_quantize": ("quantize", "down", 0),
}
#: Passes that count places and need no such check: fuse_attention replaces every attention, or raises.
WHOLE = {"fuse_attention"}
LAYERS = 3


def layered(graph: Graph) -> Graph:
    """The graph `LAYERS` times, side by side: each copy is further layers with weights of their own."""
    span = 1 + max(number for node in graph if (number := layer_of(node.path)) is not None)
    nodes = [node for node in graph if node.op == "input"]
    shared = {node.out for node in nodes}
    outputs: list[str] = []
    for copy in range(LAYERS):

        def named(name: str, copy: int = copy) -> str:
            return name if name in shared else f"{name}.copy{copy}"

        def moved(path: str, copy: int = copy) -> str:
            return LAYER.sub(lambda m: m[0].replace(m[1], str(int(m[1]) + span * copy)), path, count=1)

        for node in graph:
            if node.op != "input":
                names = {"inputs": tuple(map(named, node.inputs)), "outputs": tuple(map(named, node.outputs))}
                nodes.append(node.replace(path=moved(node.path), attrs=_attrs(node, copy, moved), **names))
        outputs += map(named, graph.outputs)
    made = Graph(graph.name, tuple(nodes), tuple(outputs))
    made.validate(ALL)
    return made


def _attrs(node: Node, copy: int, moved: object) -> object:
    """Caches by layer, and weights by name."""
    if hasattr(node.attrs, "layer"):
        return dataclasses.replace(node.attrs, layer=copy)
    if node.op == "param":
        return dataclasses.replace(node.attrs, recipe=moved(node.attrs.recipe))  # type: ignore[operator]
    return node.attrs


def source(name: str) -> Graph:
    """The golden input; for fuse_rotary with tables that depend on positions, as those of models do."""
    graph = before(name)
    if name != "fuse_rotary":
        return layered(graph)
    text = re.sub(r"  %(cos|sin): .*\n", "", str(graph))
    head = "  %positions: i32[T] = input() {name='positions'}\n"
    tables = (
        head + "  %p: f32[T] = cast(%positions) {dtype='f32'}\n  %p1: f32[T,1] = reshape(%p) {shape=('T', 1)}\n"
        "  %cos: f32[T,4] = broadcast(%p1) {shape=('T', 4)}\n  %sin: f32[T,4] = neg(%cos)\n"
    )
    return layered(parse_graph(text.replace(head, tables), attrs_of))


def disguised(graph: Graph, op: str, end: str, position: int) -> tuple[Graph, Node]:
    """The graph in which the last such node of the middle copy reads its input through two negations; that node."""
    edit, view = Edit(graph), View(graph)
    node = next(
        n for n in reversed(graph.nodes) if n.op == op and n.path.endswith(f".{end}") and n.outputs[0].endswith("copy1")
    )
    name = node.inputs[position]
    # Of experts any elementwise formula is fused, two negations as well.
    way = ("transpose", {"perm": (0, 2, 1)}) if node.op == "grouped_linear" else ("neg", {})
    there = edit.make(way[0], [name], [view.types[name]], way[1], like=node)
    back = edit.make(way[0], [there.out], [there.type], way[1], like=node)
    inputs = [*node.inputs]
    inputs[position] = back.out
    edit.swap(node, there, back, node.replace(inputs=tuple(inputs)))
    after = edit.finish()
    after.validate(ALL)
    return after, node


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_layer_that_is_not_matched_is_named(name: str) -> None:
    graph = source(name)
    _, report = apply(PASSES[name], [graph])
    assert report.matched >= LAYERS
    sabotaged, node = disguised(graph, *SABOTAGE[name])
    with pytest.raises(UnsupportedError, match=rf"pass {name} matches \d+ of \d+ layers, not ") as raised:
        apply(PASSES[name], [sabotaged])
    lost = str(raised.value).partition("not ")[2].partition(":")[0].split(", ")
    assert [layer_of(path) for path in lost] == [layer_of(node.path)]


def test_a_norm_whose_value_is_not_rounded_is_none_that_was_missed() -> None:
    """In the second layer the calibration kept the input of the product behind the norm."""
    product = (
        "bias=False, x_scale=None, x_per_token=False, x_factors=False, epilogue='none', all_reduce=False, group_start=0"
    )
    text = f"""graph kept rank=0 tp=1 {{
  %x: f32[T,16] = input() {{name='x'}}
  %w: f32[16] = param() {{recipe="load('norm.weight')"}}
  %v: f8e4m3[8,16] = param() {{recipe="load('up.weight')"}}
  %s: f32[8] = param() {{recipe="load('up.scale')"}}
  %a: f32[T,16] = rms_norm(%x, %w) {{eps=1e-05, residual=False, quantize=None}} @layers.0.norm
  %a_fp8, %a_scale: f8e4m3[T,16], f32[T,1] = quantize(%a) {{scale=None}} @layers.0.up
  %p: f32[T,8] = linear(%a_fp8, %v, %s, %a_scale) {{{product}}} @layers.0.up
  %b: f32[T,16] = rms_norm(%x, %w) {{eps=1e-05, residual=False, quantize=None}} @layers.1.norm
  %q: f32[T,8] = linear(%b, %v, %s) {{{product}}} @layers.1.up
  return %p, %q
}}
"""
    _, report = apply(PASSES["fuse_quantize"], [parse_graph(text, attrs_of)])
    assert (report.matched, report.expected) == (1, 1)


def test_every_pass_that_counts_its_places_is_sabotaged() -> None:
    counting = {name for name, step in PASSES.items() if apply(step, [before(name)])[1].expected is not None}
    assert counting == {*SABOTAGE, *WHOLE}


def placed(node: Node) -> Node:
    """A weight in the module that its name says, and stored by a name with another path."""
    name = node.attrs.recipe.split("'")[1] if node.op == "param" else ""
    if not name:
        return node
    return node.replace(path=name.rpartition(".")[0], attrs=type(node.attrs)(f"load('backbone.{name}')"))


def test_layers_of_other_tensors_are_not_held_against_one_another() -> None:
    graph = source("merge_qkv")
    graph = graph.with_nodes(map(placed, graph))
    paths = [node.path for node in graph if node.op == "rope_cache"]
    with pytest.raises(UnsupportedError, match=rf"pass some matches 2 of 3 layers, not {re.escape(paths[1])}: "):
        report_places("some", graph, graph, [paths[0], paths[2]])

    def other(node: Node) -> Node:
        same = node.op != "param" or "layers.1." not in node.path
        return node if same else node.replace(path=node.path.replace("k_proj", "kv_a_proj"))

    unlike = graph.with_nodes(map(other, graph))
    report = report_places("some", unlike, unlike, [paths[0], paths[2]], [paths[1]])
    assert (report.matched, report.expected) == (2, 3)
    assert report.notes == ("no match for layers.*.attn: runs as generic code",)
    report = report_places("some", graph, graph, [paths[0], paths[2]], other=[paths[1]])
    assert (report.matched, report.expected) == (2, 2)
