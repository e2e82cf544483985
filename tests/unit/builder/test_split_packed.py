"""Packed projections of every layout are split into plain heads, and compute what they did."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.builder.interpreter import Batch, run
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.split_packed import split_packed
from llmc.builder.weights.recipe import parse
from tests.unit.builder.weights_of import Tensors, params_of

HEAD = """
  %ids: i32[T] = input() {name='ids'}
  %positions: i32[T] = input() {name='positions'}
  %rows: i32[S] = input() {name='rows'}
  %table: f32[300,16] = param() {recipe="load('table')"}
  %x: f32[T,16] = embedding(%ids, %table)
  %w: f32[WIDTH,16] = param() {recipe="load('w')"}
  %packed: f32[T,WIDTH] = linear(%x, %w) {bias=False} @layers.0.attn.qkv"""
TAIL = """
  %a: f32[T,4,8] = attention(%q, %k, %v) {layer=0, scale=0.3, window=None, softcap=None, kv_heads=KV, head_dim=8, v_dim=8} @layers.0.attn
  %flat: f32[T,32] = reshape(%a) {shape=('T', 32)}
  return %flat"""  # noqa: E501

HEADS_OUTSIDE = """
  %p: f32[T,4,24] = reshape(%packed) {shape=('T', 4, 24)}
  %q: f32[T,4,8] = slice(%p) {axis=2, start=0, stop=8, step=1}
  %k: f32[T,4,8] = slice(%p) {axis=2, start=8, stop=16, step=1}
  %v: f32[T,4,8] = slice(%p) {axis=2, start=16, stop=24, step=1}"""
KINDS_INSIDE = """
  %p: f32[T,4,3,8] = reshape(%packed) {shape=('T', 4, 3, 8)}
  %q3: f32[T,4,1,8] = slice(%p) {axis=2, start=0, stop=1, step=1}
  %k3: f32[T,4,1,8] = slice(%p) {axis=2, start=1, stop=2, step=1}
  %v3: f32[T,4,1,8] = slice(%p) {axis=2, start=2, stop=3, step=1}
  %q: f32[T,4,8] = reshape(%q3) {shape=('T', 4, 8)}
  %k: f32[T,4,8] = reshape(%k3) {shape=('T', 4, 8)}
  %v: f32[T,4,8] = reshape(%v3) {shape=('T', 4, 8)}"""
GROUPED = """
  %p: f32[T,2,4,8] = reshape(%packed) {shape=('T', 2, 4, 8)}
  %q3: f32[T,2,2,8] = slice(%p) {axis=2, start=0, stop=2, step=1}
  %k3: f32[T,2,1,8] = slice(%p) {axis=2, start=2, stop=3, step=1}
  %v3: f32[T,2,1,8] = slice(%p) {axis=2, start=3, stop=4, step=1}
  %q: f32[T,4,8] = reshape(%q3) {shape=('T', 4, 8)}
  %k: f32[T,2,8] = reshape(%k3) {shape=('T', 2, 8)}
  %v: f32[T,2,8] = reshape(%v3) {shape=('T', 2, 8)}"""
BLOCKS_OUTSIDE = """
  %p: f32[T,2,48] = reshape(%packed) {shape=('T', 2, 48)}
  %q3: f32[T,2,16] = slice(%p) {axis=2, start=0, stop=16, step=1}
  %v3: f32[T,2,16] = slice(%p) {axis=2, start=16, stop=32, step=1}
  %k3: f32[T,2,16] = slice(%p) {axis=2, start=32, stop=48, step=1}
  %q: f32[T,4,8] = reshape(%q3) {shape=('T', 4, 8)}
  %k: f32[T,4,8] = reshape(%k3) {shape=('T', 4, 8)}
  %v: f32[T,4,8] = reshape(%v3) {shape=('T', 4, 8)}"""
TWO_STAGES = """
  %q2: f32[T,32] = slice(%packed) {axis=1, start=0, stop=32, step=1}
  %kv: f32[T,64] = slice(%packed) {axis=1, start=32, stop=96, step=1}
  %q: f32[T,4,8] = reshape(%q2) {shape=('T', 4, 8)}
  %p: f32[T,4,16] = reshape(%kv) {shape=('T', 4, 16)}
  %k: f32[T,4,8] = slice(%p) {axis=2, start=0, stop=8, step=1}
  %v: f32[T,4,8] = slice(%p) {axis=2, start=8, stop=16, step=1}"""
TURNED = """
  %p: f32[T,8,12] = reshape(%packed) {shape=('T', 8, 12)}
  %t: f32[T,12,8] = transpose(%p) {perm=(0, 2, 1)}
  %q: f32[T,4,8] = slice(%t) {axis=1, start=0, stop=4, step=1}
  %k: f32[T,4,8] = slice(%t) {axis=1, start=4, stop=8, step=1}
  %v: f32[T,4,8] = slice(%t) {axis=1, start=8, stop=12, step=1}"""
#: One query whose first columns a rotation takes; keys and values are whole projections.
PARTIAL = """
  %q3: f32[T,4,8] = reshape(%packed) {shape=('T', 4, 8)}
  %low: f32[T,4,2] = slice(%q3) {axis=2, start=0, stop=2, step=1}
  %rest: f32[T,4,6] = slice(%q3) {axis=2, start=2, stop=8, step=1}
  %turned: f32[T,4,2] = neg(%low)
  %q: f32[T,4,8] = concat(%turned, %rest) {axis=2}
  %k: f32[T,4,8] = reshape(%x2) {shape=('T', 4, 8)}
  %v: f32[T,4,8] = reshape(%x2) {shape=('T', 4, 8)}"""

LAYOUTS = {
    "heads outside": (HEADS_OUTSIDE, 4, 3),
    "kinds inside": (KINDS_INSIDE, 4, 3),
    "grouped": (GROUPED, 2, 3),
    "blocks outside": (BLOCKS_OUTSIDE, 4, 3),
    "two stages": (TWO_STAGES, 4, 3),
    "turned": (TURNED, 4, 3),
}


def graph_of(body: str, kv_heads: int, width: int) -> Graph:
    text = (HEAD + body + TAIL).replace("WIDTH", str(width)).replace("KV", str(kv_heads))
    graph = parse_graph(f"graph g rank=0 tp=1 {{\n{text}\n}}", attrs_of)
    graph.validate(ALL)
    return graph


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_plain_heads(layout: str) -> None:
    body, kv_heads, linears = LAYOUTS[layout]
    before = graph_of(body, kv_heads, 64 if kv_heads == 2 else 96)
    after, report = split_packed(before)
    after.validate(ALL)
    assert report.matched == (2 if layout == "two stages" else 1)
    assert sum(node.op == "linear" for node in after) == linears
    assert not any(node.op in ("slice", "transpose") for node in after)
    assert all(len(node.attrs.recipe) < 80 for node in after if node.op == "param" and layout != "turned")
    rng = np.random.default_rng(0)
    shapes = {n.attrs.recipe[6:-2]: n.type.shape for n in before if n.op == "param"}
    params = params_of(Tensors({k: rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()}, {}))
    for (want,), (have,) in zip(_steps(before, params), _steps(after, params), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)


def _steps(graph: Graph, params: object) -> list[tuple[np.ndarray, ...]]:
    batch = Batch(graph, capacities=(9, 5))
    return [run(graph, *batch.step(tokens), params) for tokens in ([[5, 6, 7], [8]], [[9], [10, 11]])]  # type: ignore[arg-type]


def test_the_part_of_a_head_that_turns_is_no_piece() -> None:
    second = HEAD.replace("%w:", "%w2:").replace("%packed:", "%x2:").replace("%x, %w)", "%x, %w2)")
    extra = "\n".join(line for line in second.splitlines() if "%w2" in line)
    graph = graph_of("\n" + extra + PARTIAL, 4, 32)
    after, report = split_packed(graph)
    assert report.matched == 0
    assert str(after) == str(graph)


def test_the_rows_of_a_grouped_layout() -> None:
    after, _ = split_packed(graph_of(GROUPED, 2, 64))
    recipes = {str(parse(n.attrs.recipe)) for n in after if n.op == "param"} - {"load('table')"}
    assert recipes == {
        "runs(load('w'), 0, 2, 16, 32)",
        "runs(load('w'), 16, 2, 8, 32)",
        "runs(load('w'), 24, 2, 8, 32)",
    }
