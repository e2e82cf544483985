"""Row programs from graphs: groups that would wait for each other stay apart, and the result computes the same."""

from __future__ import annotations

from functools import cache

from llmc.builder.ir import parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.fuse_rows import fuse_rows
from llmc.builder.verify import Verifier
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import parse

#: %c.. is a group that %o reads early and that reads %l, which waits for the group of %r; what reads %o cannot join %r.
WAITING = """graph g rank=0 tp=1 {
  %x: f32[T,8] = input() {name='x'}
  %w: f32[8,8] = param() {recipe="load('w')"}
  %zero: f32[] = const() {values=(0.0,)}
  %y: f32[T,8] = linear(%x, %w) {bias=False}
  %c1: f32[T,8] = exp(%x)
  %o: f32[T,8] = linear(%c1, %w) {bias=False}
  %r1: f32[T,8] = sigmoid(%y)
  %l: f32[T,8] = linear(%r1, %w) {bias=False}
  %c2: f32[T,8] = add(%c1, %l)
  %p: bool[T,8] = gt(%c2, %zero)
  %c3: f32[T,8] = where(%p, %c2, %c1)
  %q: bool[T,8] = gt(%r1, %o)
  %n: f32[T,8] = where(%q, %r1, %zero)
  %z: f32[T,8] = linear(%n, %w) {bias=False}
  %e: f32[T,8] = linear(%c3, %w) {bias=False}
  %s: f32[T,8] = add(%z, %e)
  return %s
}"""


def test_groups_that_would_wait_for_each_other_stay_apart() -> None:
    graph = parse_graph(WAITING, attrs_of)
    graph.validate(ALL)
    after, report = fuse_rows(graph)
    after.validate(ALL)
    assert report.matched == 2
    programs = [node.inputs for node in after if node.op == "rowwise"]
    assert programs == [("x", "l"), ("r1", "o")]
    weights = RandomWeights([graph])
    verifier = Verifier(cache(lambda recipe: evaluate(parse(recipe), weights)))
    verifier.check("fuse_rows", (graph,), (after,))
    assert verifier.deviations
