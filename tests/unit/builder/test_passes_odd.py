"""Passes on graphs that look like what they match and are not, or where more reads a value than a model's layers do:
each keeps what the graph computes.
"""

from __future__ import annotations

from functools import cache

import pytest

from llmc.artifacts.schema import PassReport
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.pipeline import CompileOptions, by_name, run_passes
from llmc.builder.verify import Verifier
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import parse
from tests.golden.goldens import FOLDER

SHARED = """
  %x: f32[T,32] = input() {name='x'}
  %wq: f32[32,32] = param() {recipe="load('q')"}
  %wk: f32[8,32] = param() {recipe="load('k')"}
  %wv: f32[8,32] = param() {recipe="load('v')"}
  %wo: f32[32,32] = param() {recipe="load('o')"}
  %wz: f32[32,8] = param() {recipe="load('z')"}
  %q: f32[T,32] = linear(%x, %wq) {bias=False} @layers.0.q
  %k: f32[T,8] = linear(%x, %wk) {bias=False} @layers.0.k
  %v: f32[T,8] = linear(%x, %wv) {bias=False} @layers.0.v
  %r: f32[T,4,8] = rope_cache(%q, %k, %v) {layer=0, heads=4, kv_heads=1, head_dim=8} @layers.0.attn
  %a: f32[T,32] = paged_attention(%r) {layer=0, heads=4, kv_heads=1, head_dim=8, scale=0.25} @layers.0.attn
  %o: f32[T,32] = linear(%a, %wo) {bias=False} @layers.0.o"""

GATED = """
  %x: f32[T,8] = input() {name='x'}
  %w: f32[16,8] = param() {recipe="load('w')"}
  %y: f32[T,16] = linear(%x, %w) {bias=False} @layers.0.mlp
  %g: f32[T,4] = slice(%y) {axis=1, start=0, stop=8, step=2} @layers.0.mlp
  %u: f32[T,4] = slice(%y) {axis=1, start=8, stop=16, step=2} @layers.0.mlp
  %s: f32[T,4] = silu(%g) @layers.0.mlp
  %m: f32[T,4] = mul(%s, %u) @layers.0.mlp
  return %m"""

#: Two layers of the same tensors, of which the second keeps what of a gate is above its row's mean.
SPARSE = """
  %x: f32[T,8] = input() {name='x'}
  %wg0: f32[4,8] = param() {recipe="load('layers.0.mlp.gate.weight')"} @layers.0.mlp.gate
  %wu0: f32[4,8] = param() {recipe="load('layers.0.mlp.up.weight')"} @layers.0.mlp.up
  %wd0: f32[8,4] = param() {recipe="load('layers.0.mlp.down.weight')"} @layers.0.mlp.down
  %wg1: f32[4,8] = param() {recipe="load('layers.1.mlp.gate.weight')"} @layers.1.mlp.gate
  %wu1: f32[4,8] = param() {recipe="load('layers.1.mlp.up.weight')"} @layers.1.mlp.up
  %g0: f32[T,4] = linear(%x, %wg0) {bias=False} @layers.0.mlp.gate
  %u0: f32[T,4] = linear(%x, %wu0) {bias=False} @layers.0.mlp.up
  %s0: f32[T,4] = silu(%g0) @layers.0.mlp
  %m0: f32[T,4] = mul(%s0, %u0) @layers.0.mlp
  %y: f32[T,8] = linear(%m0, %wd0) {bias=False} @layers.0.mlp.down
  %g1: f32[T,4] = linear(%y, %wg1) {bias=False} @layers.1.mlp.gate
  %mean: f32[T,1] = reduce(%g1) {kind='mean', axis=-1, keepdim=True} @layers.1.mlp
  %far: f32[T,4] = sub(%g1, %mean) @layers.1.mlp
  %kept: f32[T,4] = relu(%far) @layers.1.mlp
  %u1: f32[T,4] = linear(%y, %wu1) {bias=False} @layers.1.mlp.up
  %s1: f32[T,4] = silu(%kept) @layers.1.mlp
  %m1: f32[T,4] = mul(%s1, %u1) @layers.1.mlp
  %wd1: f32[8,4] = param() {recipe="load('layers.1.mlp.down.weight')"} @layers.1.mlp.down
  %z: f32[T,8] = linear(%m1, %wd1) {bias=False} @layers.1.mlp.down
  return %z"""

#: Each head's first half is turned against the other head: pairs along the axis of heads.
ACROSS = """
  %q: f32[T,16] = input() {name='q'}
  %cos: f32[T,8] = input() {name='cos'}
  %sin: f32[T,8] = input() {name='sin'}
  %cos3: f32[T,1,8] = reshape(%cos) {shape=('T', 1, 8)}
  %sin3: f32[T,1,8] = reshape(%sin) {shape=('T', 1, 8)}
  %h: f32[T,2,8] = reshape(%q) {shape=('T', 2, 8)}
  %low: f32[T,1,8] = slice(%h) {axis=1, start=0, stop=2, step=2}
  %high: f32[T,1,8] = slice(%h) {axis=1, start=1, stop=2, step=2}
  %neg: f32[T,1,8] = neg(%high)
  %a4: f32[T,1,8,1] = reshape(%neg) {shape=('T', 1, 8, 1)}
  %b4: f32[T,1,8,1] = reshape(%low) {shape=('T', 1, 8, 1)}
  %pairs: f32[T,1,8,2] = concat(%a4, %b4) {axis=3}
  %turned: f32[T,2,8] = reshape(%pairs) {shape=('T', 2, 8)}
  %c: f32[T,2,8] = mul(%h, %cos3)
  %s: f32[T,2,8] = mul(%turned, %sin3)
  %sum: f32[T,2,8] = add(%c, %s)
  %f: f32[T,16] = reshape(%sum) {shape=('T', 16)}
  %r: f32[T,2,8] = rope_cache(%f, %f, %q) {layer=0, heads=2, kv_heads=2, head_dim=8} @layers.0.attn
  %o: f32[T,16] = paged_attention(%r) {layer=0, heads=2, kv_heads=2, head_dim=8, scale=0.25} @layers.0.attn
  return %o"""

SUMS = """
  %x: f32[T,8] = input() {name='x'}
  %y: f32[T,8] = input() {name='y'}
  %w: f32[8] = param() {recipe="load('w')"}
  %s: f32[T,8] = add(%x, %y) @layers.0
  %n: f32[T,8] = rms_norm(%s, %w) {eps=1e-06, residual=False} @layers.0.norm
  %m: f32[T,8] = rms_norm(%s, %w) {eps=1e-03, residual=False} @layers.0.second_norm
  %e: f32[T,8] = exp(%s) @layers.0
  return %s, %n, %m, %e"""


def graph_of(lines: str) -> Graph:
    """A graph of these lines, checked."""
    graph = parse_graph(f"graph g rank=0 tp=1 {{\n{lines}\n}}", attrs_of)
    graph.validate(ALL)
    return graph


def verified(graph: Graph, *names: str, tp: int = 1) -> tuple[tuple[Graph, ...], list[PassReport]]:
    """Runs these passes, each checked against the graph before it: what they made, and their reports."""
    weights, passes = RandomWeights([graph]), by_name(CompileOptions(tp=tp))
    verifier = Verifier(cache(lambda recipe: evaluate(parse(recipe), weights)))
    stages = list(run_passes((graph,), [passes[name] for name in names], verifier))
    for made in stages[-1].graphs:
        made.validate(ALL)
    return stages[-1].graphs, [stage.report for stage in stages if stage.report]


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    "after",
    [
        "%z: f32[T,32] = linear(%v, %wz) {bias=False} @layers.0.z\n  %s: f32[T,32] = add(%o, %z)\n  return %s",
        "%g: f32[T,8] = sigmoid(%k)\n  %z: f32[T,32] = linear(%g, %wz) {bias=False} @layers.0.z\n  return %o, %z",
        "return %o, %v",
    ],
    ids=("values", "keys", "returned"),
)
def test_keys_and_values_that_ranks_share_are_whole_where_more_than_attention_reads_them(after: str, tp: int) -> None:
    graphs, reports = verified(graph_of(f"{SHARED}\n  {after}"), "shard", "merge_qkv", tp=tp)
    assert len(graphs) == tp
    assert "linear @layers.0.o: cannot be divided, every rank computes all of it" not in reports[0].notes


def test_one_linear_for_keys_and_values_is_joined_once() -> None:
    graph = graph_of(SHARED.replace("rope_cache(%q, %k, %v)", "rope_cache(%q, %k, %k)") + "\n  return %o")
    (after,), (report,) = verified(graph, "merge_qkv")
    assert report.matched == 1
    assert [node.type.shape for node in after if node.op == "linear"] == [("T", 40), ("T", 32)]


def test_a_gated_product_of_every_other_column_is_none_of_halves() -> None:
    _, (merged, report) = verified(graph_of(GATED), "merge_gate_up", "fuse_activation")
    assert (merged.matched, report.matched) == (0, 0)


def test_a_gate_that_its_whole_row_decides_is_none_that_was_missed() -> None:
    _, reports = verified(graph_of(SPARSE), "merge_gate_up", "fuse_activation")
    assert [(report.matched, report.expected) for report in reports] == [(1, 1), (1, 1)]


def test_a_rotation_across_heads_is_no_rotation_of_heads() -> None:
    _, (report,) = verified(graph_of(ACROSS), "fuse_rotary")
    assert report.matched == 0


def test_a_sum_that_is_returned_and_read_twice_is_computed_once() -> None:
    (after,), (report,) = verified(graph_of(SUMS), "fuse_residual_norm")
    assert report.matched == 1
    assert not [node for node in after if node.op == "add"]


def latent(old: str, new: str) -> Graph:
    """The golden input of fuse_latent_cache with other lines for its query."""
    text = (FOLDER / "fuse_latent_cache.before.ir").read_text()
    assert old in text
    graph = parse_graph(text.replace(old, new), attrs_of)
    graph.validate(ALL)
    return graph


def test_queries_whose_pairs_lie_otherwise_than_those_of_keys_keep_their_rotation() -> None:
    side_by_side = """%first4: f32[T,2,2,1] = reshape(%q.first) {shape=('T', 2, 2, 1)} @layers.0.attn
  %second4: f32[T,2,2,1] = reshape(%q.second) {shape=('T', 2, 2, 1)} @layers.0.attn
  %both: f32[T,2,2,2] = concat(%first4, %second4) {axis=3} @layers.0.attn
  %turned: f32[T,2,4] = reshape(%both) {shape=('T', 2, 4)} @layers.0.attn"""
    halves = "%turned: f32[T,2,4] = concat(%q.first, %q.second) {axis=2} @layers.0.attn"
    across = """%turned4: f32[T,4,2] = concat(%q.first, %q.second) {axis=1} @layers.0.attn
  %turned: f32[T,2,4] = reshape(%turned4) {shape=('T', 2, 4)} @layers.0.attn"""
    for other in (side_by_side, across):
        (after,), _ = verified(latent(halves, other), "fuse_latent_cache")
        (cache_node,) = (node for node in after if node.op == "latent_cache")
        assert cache_node.attrs.style is None
        assert cache_node.attrs.norm_eps is not None
