"""Every kind of attention through the whole pipeline: one rank and several compute what the primitives do."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.builder import pipeline
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from tests.unit.builder.weights_of import Tensors, params_of

HEADS, KV, DIM = 6, 2, 8
HEAD = """
  %ids: i32[T] = input() {name='ids'}
  %positions: i32[T] = input() {name='positions'}
  %rows: i32[S] = input() {name='rows'}
  %table: f32[300,16] = param() {recipe="load('table')"}
  %x: f32[T,16] = embedding(%ids, %table)
  %wq: f32[48,16] = param() {recipe="load('wq')"}
  %wk: f32[16,16] = param() {recipe="load('wk')"}
  %wv: f32[VALUES,16] = param() {recipe="load('wv')"}
  %q0: f32[T,48] = linear(%x, %wq) {bias=False} @layers.0.attn.q_proj
  %k0: f32[T,16] = linear(%x, %wk) {bias=False} @layers.0.attn.k_proj
  %v0: f32[T,VALUES] = linear(%x, %wv) {bias=False} @layers.0.attn.v_proj"""
PLAIN = """
  %q: f32[T,6,8] = reshape(%q0) {shape=('T', 6, 8)}
  %k: f32[T,2,8] = reshape(%k0) {shape=('T', 2, 8)}"""
#: One norm over all heads of q, one over all heads of k.
NORM_ALL = """
  %wqn: f32[48] = param() {recipe="load('wqn')"}
  %wkn: f32[16] = param() {recipe="load('wkn')"}
  %q1: f32[T,48] = rms_norm(%q0, %wqn) {eps=1e-05} @layers.0.attn.q_norm
  %k1: f32[T,16] = rms_norm(%k0, %wkn) {eps=1e-05} @layers.0.attn.k_norm
  %q: f32[T,6,8] = reshape(%q1) {shape=('T', 6, 8)}
  %k: f32[T,2,8] = reshape(%k1) {shape=('T', 2, 8)}"""
LAYER_NORM = """
  %wn: f32[8] = param() {recipe="load('wn')"}
  %bn: f32[8] = param() {recipe="load('bn')"}
  %q1: f32[T,6,8] = reshape(%q0) {shape=('T', 6, 8)}
  %k1: f32[T,2,8] = reshape(%k0) {shape=('T', 2, 8)}
  %q: f32[T,6,8] = layer_norm(%q1, %wn, %bn) {eps=1e-05} @layers.0.attn.q_norm
  %k: f32[T,2,8] = layer_norm(%k1, %wn, %bn) {eps=1e-05} @layers.0.attn.k_norm"""
SCALED = """
  %eighth: f32[] = const() {values=(0.125,)}
  %qs: f32[T,48] = mul(%q0, %eighth) @layers.0.attn
  %q: f32[T,6,8] = reshape(%qs) {shape=('T', 6, 8)}
  %k: f32[T,2,8] = reshape(%k0) {shape=('T', 2, 8)}"""
TAIL = """
  %v: f32[T,2,WIDTH] = reshape(%v0) {shape=('T', 2, WIDTH)}
  %slopes: f32[6] = param() {recipe="load('slopes')"} @layers.0.attn
  %sinks: f32[6] = param() {recipe="load('sinks')"} @layers.0.attn
  %a: f32[T,6,WIDTH] = attention(%q, %k, %vBY_HEAD) {layer=0, scale=0.3, kv_heads=2, head_dim=8, v_dim=WIDTH, OPTIONS} @layers.0.attn
  %f: f32[T,ALL] = reshape(%a) {shape=('T', ALL)} @layers.0.attn
  %wo: f32[16,ALL] = param() {recipe="load('wo')"}
  %y: f32[T,16] = linear(%f, %wo) {bias=False} @layers.0.attn.o_proj
  %s: f32[S,16] = select_rows(%y, %rows)
  %head: f32[40,16] = param() {recipe="load('head')"}
  %logits: f32[S,40] = linear(%s, %head) {bias=False} @lm_head
  return %logits"""  # noqa: E501

DEFAULTS = {"window": None, "softcap": None, "chunk": None, "slopes": False, "sinks": False}
#: Name -> (what makes q and k, options of the attention, width of a value head, launches: linears, cache, attention).
KINDS: dict[str, tuple[str, dict[str, object], int]] = {
    "plain": (PLAIN, {}, 8),
    "sinks": (PLAIN, {"sinks": True}, 8),
    "slopes": (PLAIN, {"slopes": True, "window": 5}, 8),
    "chunks": (PLAIN, {"chunk": 4}, 8),
    "wide values": (PLAIN, {"softcap": 2.0}, 12),
    "norm over all heads": (NORM_ALL, {}, 8),
    "layer norm of heads": (LAYER_NORM, {"sinks": True, "slopes": True}, 8),
    "scaled queries": (SCALED, {}, 8),
}


def graph_of(kind: str) -> Graph:
    body, options, width = KINDS[kind]
    options = DEFAULTS | options
    by_head = "".join(f", %{name}" for name in ("slopes", "sinks") if options[name])
    text = (HEAD + body + TAIL).replace("OPTIONS", ", ".join(f"{k}={v!r}" for k, v in options.items()))
    text = text.replace("BY_HEAD", by_head).replace("VALUES", str(KV * width)).replace("ALL", str(HEADS * width))
    graph = parse_graph(f"graph g rank=0 tp=1 {{\n{text.replace('WIDTH', str(width))}\n}}", attrs_of)
    graph.validate(ALL)
    return graph


def steps(graphs: tuple[Graph, ...], params: object) -> list[np.ndarray]:
    """Logits of a ragged prefill, then of two decode steps."""
    batches = [Batch(graph, capacities=(14, 7)) for graph in graphs]
    results = []
    for tokens in ([[5, 6, 7, 20, 21, 22, 23, 24, 25], [8, 9]], [[9], [10, 11, 12]], [[4, 3], [2]]):
        given = [batch.step(tokens) for batch in batches]
        ranks = run_ranks(graphs, given[0][0], [context for _, context in given], params)  # type: ignore[arg-type]
        results.append(np.concatenate([logits for (logits,) in ranks], axis=1))
    return results


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_what_the_primitives_do(kind: str, tp: int) -> None:
    before = graph_of(kind)
    rng = np.random.default_rng(0)
    shapes = {node.attrs.recipe[6:-2]: node.type.shape for node in before if node.op == "param"}
    params = params_of(Tensors({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, {}))
    compiled = pipeline.run(before, pipeline.CompileOptions(tp=tp))
    for want, have in zip(steps((before,), params), steps(compiled.graphs, params), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    per_layer = 4 + 2 * (kind == "norm over all heads" and tp > 1)
    assert compiled.launches[0].per_layer == per_layer
    assert not [note for report in compiled.reports for note in report.notes]
