"""The interpreter: steps over one cache, ranks that add up, and values that are not what their node says."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.builder.interpreter import Batch, make_context, run, run_ranks
from llmc.builder.ir import Graph, GraphError, parse_graph
from llmc.builder.operators import ALL, attrs_of

ATTENDING = """graph g rank=0 tp=1 {
  %ids: i32[T] = input() {name='ids'}
  %rows: i32[S] = input() {name='rows'}
  %table: f32[9,8] = param() {recipe="load('table')"}
  %x: f32[T,8] = embedding(%ids, %table)
  %q: f32[T,2,4] = reshape(%x) {shape=('T', 2, 4)}
  %a: f32[T,2,4] = attention(%q, %q, %q) {ATTRS}
  %y: f32[T,8] = reshape(%a) {shape=('T', 8)}
  %z: f32[S,8] = select_rows(%y, %rows)
  return %z
}""".replace("ATTRS", "layer=3, scale=0.5, window=None, softcap=None, kv_heads=2, head_dim=4, v_dim=4")

#: Each rank multiplies its half of x and the halves are added.
SHARDED = """graph g rank={rank} tp=2 {{
  %x: f32[T,3] = input() {{name='x'}}
  %w: f32[5,3] = param() {{recipe="load('w{rank}')"}}
  %p: f32[T,5] = linear(%x, %w) {{bias=False}}
  %y: f32[T,5] = all_reduce(%p)
  {extra}
  return %y
}}"""


def graph(text: str) -> Graph:
    parsed = parse_graph(text, attrs_of)
    parsed.validate(ALL)
    return parsed


def table(recipe: str) -> np.ndarray:
    assert recipe == "load('table')"
    return np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)


def test_a_step_depends_neither_on_its_company_nor_on_the_blocks() -> None:
    parsed = graph(ATTENDING)
    alone = Batch(parsed, [7], block_size=2, seed=5)
    wanted = [run(parsed, *alone.step([[token]]), table)[0][0] for token in (1, 2, 3, 4, 5)]
    batch = Batch(parsed, [3, 5], block_size=3)
    (first,) = run(parsed, *batch.step([[8, 8], [1, 2, 3]], rows="all"), table)
    (second,) = run(parsed, *batch.step([[7], [4]]), table)
    (third,) = run(parsed, *batch.step([[], [5]]), table)
    np.testing.assert_allclose(np.stack([*first[2:], second[1], third[0]]), np.stack(wanted), atol=1e-6)


def test_block_tables_are_permuted_and_disjoint() -> None:
    context = make_context(graph(ATTENDING), [9, 4], block_size=2, seed=1)
    used = [*context.block_tables[0], *context.block_tables[1][:2]]
    assert sorted(used) == list(range(7))
    assert used != sorted(used)
    assert context.kv[3].keys.shape == (7, 2, 2, 4)


def test_a_sequence_has_an_end() -> None:
    with pytest.raises(ValueError, match="sequence 0 has room for 2 tokens, not 3"):
        Batch(graph(ATTENDING), [2]).step([[1, 2, 3]])


def test_caches_in_bf16_are_rounded() -> None:
    parsed = graph(ATTENDING)
    (exact,) = run(parsed, *Batch(parsed, [3]).step([[1, 2, 3]]), table)
    (rounded,) = run(parsed, *Batch(parsed, [3], kv_dtype="bf16").step([[1, 2, 3]]), table)
    assert 1e-5 < np.abs(exact - rounded).max() < 0.1


def test_ranks_add_up() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    weights = {f"load('w{r}')": rng.normal(size=(5, 3)).astype(np.float32) for r in (0, 1)}
    graphs = [graph(SHARDED.format(rank=r, extra="")) for r in (0, 1)]
    contexts = [make_context(g, [4]) for g in graphs]
    results = run_ranks(graphs, {"x": x}, contexts, weights.__getitem__)
    np.testing.assert_allclose(results[0][0], x @ weights["load('w0')"].T + x @ weights["load('w1')"].T, atol=1e-5)
    np.testing.assert_array_equal(results[0][0], results[1][0])


def test_a_failing_rank_does_not_hang_the_others() -> None:
    graphs = [graph(SHARDED.format(rank=r, extra="")) for r in (0, 1)]
    contexts = [make_context(g, [4]) for g in graphs]
    with pytest.raises(KeyError, match="w1"):
        run_ranks(graphs, {"x": np.ones((4, 3))}, contexts, {"load('w0')": np.ones((5, 3), np.float32)}.__getitem__)


def test_ranks_that_meet_less_often() -> None:
    more = graph(SHARDED.format(rank=1, extra="%z: f32[T,5] = all_reduce(%y)"))
    graphs = [graph(SHARDED.format(rank=0, extra="")), more]
    with pytest.raises(GraphError, match="do not agree"):
        run_ranks(graphs, {"x": np.ones((4, 3))}, [make_context(g, [4]) for g in graphs],
                  lambda _: np.ones((5, 3), np.float32), patience=0.2)  # fmt: skip


def test_values_are_checked_against_their_types() -> None:
    parsed = graph(ATTENDING)
    with pytest.raises(GraphError, match=r"param %table: declared f32\[9,8\], the value is float64\[9, 8\]"):
        run(parsed, *Batch(parsed, [3]).step([[1]]), lambda _: np.zeros((9, 8)))
    with pytest.raises(GraphError, match=r"param %table: declared f32\[9,8\], the value is float32\[8, 9\]"):
        run(parsed, *Batch(parsed, [3]).step([[1]]), lambda _: np.zeros((8, 9), np.float32))
    inputs, context = Batch(parsed, [3]).step([[1]])
    del inputs["rows"]
    with pytest.raises(GraphError, match="no array named 'rows'"):
        run(parsed, inputs, context, table)
