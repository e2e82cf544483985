"""Division among ranks: how runs are cut, and what stops or limits it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.regions import divide, divide_columns, divide_heads
from llmc.builder.passes.shard import shard
from llmc.builder.pipeline import CompileOptions, run
from llmc.builder.trace import trace_model
from llmc.builder.verify import Verifier
from llmc.builder.weights.recipe import parse
from llmc.tiny import VOCAB
from llmc.tiny_model import random_model
from tests.unit.builder.weights_of import model_tensors, params_of

HEADS = "layer=0, heads={h}, kv_heads={kv}, head_dim=8"


def attention_graph(after: str, heads: int = 6, kv: int = 3) -> Graph:
    """One attention layer whose output `%a` f32[T,heads*8] is read by the lines `after`."""
    n, sizes = heads * 8, HEADS.format(h=heads, kv=kv)
    return parse_graph(
        f"""graph g rank=0 tp=1 {{
  %x: f32[T,32] = input() {{name='x'}}
  %wq: f32[{n},32] = param() {{recipe="load('q')"}}
  %wk: f32[{kv * 8},32] = param() {{recipe="load('k')"}}
  %wo: f32[32,{n}] = param() {{recipe="load('o')"}}
  %w: f32[{n}] = param() {{recipe="load('w')"}}
  %q: f32[T,{n}] = linear(%x, %wq) {{bias=False}} @layers.0.q_proj
  %k: f32[T,{kv * 8}] = linear(%x, %wk) {{bias=False}} @layers.0.k_proj
  %v: f32[T,{kv * 8}] = linear(%x, %wk) {{bias=False}} @layers.0.v_proj
  %r: f32[T,{heads},8] = rope_cache(%q, %k, %v) {{{sizes}, rotary=0, style='half', qk_norm_eps=None}} @layers.0.attn
  %a: f32[T,{n}] = paged_attention(%r) {{{sizes}, scale=0.25, window=None, softcap=None}} @layers.0.attn
  {after}
}}""",
        attrs_of,
    )


@pytest.mark.parametrize(("family", "sizes"), [
    ("bloom", {"hidden_size": 40, "n_head": 5, "n_layer": 2}),
    ("mpt", {"d_model": 40, "n_heads": 5, "n_layers": 2, "max_seq_len": 64}),
])  # fmt: skip
def test_ranks_have_the_slopes_of_their_heads(family: str, sizes: dict[str, int]) -> None:
    """ALiBi's slopes are a table of the model's own, one number a head: three of five heads, and two."""
    config = AutoConfig.for_model(family, vocab_size=VOCAB, **sizes)
    traced = trace_model(config)
    verifier = Verifier(params_of(model_tensors(random_model(config, 0), traced.buffers)))
    ranks = run(traced.graph, CompileOptions(tp=2, verifier=verifier)).graphs
    attention = [[node.attrs for node in rank if node.op == "paged_attention"] for rank in ranks]
    assert [[a.heads for a in layers] for layers in attention] == [[3, 3], [2, 2]]
    assert all(a.slopes for layers in attention for a in layers)
    assert dict(verifier.deviations)["shard"] < 1e-5


@given(st.integers(1, 5000), st.integers(1, 16))
def test_columns_are_divided_without_gap_or_overlap(width: int, tp: int) -> None:
    runs = divide_columns(width, tp)
    if runs is None:
        assert width < tp
        return
    assert [r.start for r in runs] == [0, *(r.stop for r in runs[:-1])]
    assert runs[-1].stop == width
    assert all(len(r) > 0 for r in runs)
    if width >= 64 * tp:
        assert all(r.start % 64 == 0 for r in runs)


def test_earlier_ranks_get_the_extra_head() -> None:
    assert [len(run) for run in divide(3, 2)] == [2, 1]
    assert [len(run) for run in divide(8, 3)] == [3, 3, 2]


@pytest.mark.parametrize(("heads", "kv", "tp"), [(6, 3, 2), (6, 3, 6), (8, 1, 3), (8, 2, 5), (4, 4, 4)])
def test_each_query_head_has_one_rank_and_its_kv_head_there(heads: int, kv: int, tp: int) -> None:
    ranks = divide_heads(heads, kv, tp)
    assert [h for r in ranks for h in range(r.query.start, r.query.stop)] == list(range(heads))
    for rank in ranks:
        assert {h // (heads // kv) for h in range(rank.query.start, rank.query.stop)} == set(
            range(rank.kv.start, rank.kv.stop)
        )


def test_ranks_beyond_the_kv_heads_share_them() -> None:
    graph = attention_graph("%o: f32[T,32] = linear(%a, %wo) {bias=False} @layers.0.o_proj\n  return %o", 4, 1)
    ranks, report = shard(graph, 2)
    assert not report.notes
    for rank, (start, stop) in zip(ranks, [(0, 16), (16, 32)], strict=True):
        rank.validate(ALL)
        cache = next(node for node in rank if node.op == "rope_cache")
        assert (cache.attrs.heads, cache.attrs.kv_heads) == (2, 1)
        recipes = {node.attrs.recipe for node in rank if node.op == "param"}
        assert {f"slice(load('q'), 0, {start}, {stop})", "slice(load('k'), 0, 0, 8)"} <= recipes


def test_more_ranks_than_query_heads_are_refused_with_both_numbers() -> None:
    graph = attention_graph("%o: f32[T,32] = linear(%a, %wo) {bias=False} @layers.0.o_proj\n  return %o")
    with pytest.raises(UnsupportedError, match=r"tp 7 is larger than the 6 query heads of layer 0.*largest tp.* is 6"):
        shard(graph, 7)


def test_attention_whose_output_is_normed_runs_whole_and_says_so() -> None:
    graph = attention_graph(
        "%n: f32[T,48] = rms_norm(%a, %w) {eps=1e-06, residual=False} @layers.0.norm\n"
        "  %o: f32[T,32] = linear(%n, %wo) {bias=False} @layers.0.o_proj\n  %s: f32[T,32] = add(%o, %x)\n  return %s"
    )
    ranks, report = shard(graph, 2)
    for rank in ranks:
        rank.validate(ALL)
        assert set(rank.nodes) == set(graph.nodes)
    assert len(report.notes) == 4
    assert "layers.0.q_proj: cannot be divided" in report.notes[0]


def test_a_norm_over_all_heads_leaves_its_linear_whole_and_cuts_the_heads_by_views() -> None:
    graph = attention_graph("%o: f32[T,32] = linear(%a, %wo) {bias=False} @layers.0.o_proj\n  return %o")
    text = str(graph).replace("rope_cache(%q,", "rope_cache(%qn,")
    text = text.replace(
        "  %r:", "  %qn: f32[T,48] = rms_norm(%q, %w) {eps=1e-06, residual=False} @layers.0.q_norm\n  %r:"
    )
    ranks, report = shard(parse_graph(text, attrs_of), 3)
    rank = ranks[1]
    rank.validate(ALL)
    cache = next(node for node in rank if node.op == "rope_cache")
    cut = rank.producers()[cache.inputs[0]]
    assert (cut.op, cut.attrs.start, cut.attrs.stop) == ("slice", 16, 32)
    assert cache.attrs.heads, cache.attrs.kv_heads == (2, 1)
    assert [note for note in report.notes if "q_proj" in note]


def test_values_between_attention_and_output_projection_are_divided_with_it() -> None:
    graph = attention_graph(
        "%b: f32[T,48] = mul(%a, %w) @layers.0.gate\n"
        "  %g: f32[T,48] = linear(%x, %wq) {bias=False} @layers.0.gate_proj\n"
        "  %s: f32[T,48] = sigmoid(%g) @layers.0.gate\n"
        "  %c: f32[T,48] = mul(%b, %s) @layers.0.gate\n"
        "  %o: f32[T,32] = linear(%c, %wo) {bias=False} @layers.0.o_proj\n  return %o"
    )
    ranks, report = shard(graph, 2)
    assert not report.notes
    for rank, (start, stop) in zip(ranks, [(0, 32), (32, 48)], strict=True):
        rank.validate(ALL)
        recipes = {str(parse(node.attrs.recipe)) for node in rank if node.op == "param"}
        assert f"slice(load('w'), 0, {start}, {stop})" in recipes
        assert f"slice(load('o'), 1, {start}, {stop})" in recipes
        assert rank.producers()["o"].attrs.all_reduce
