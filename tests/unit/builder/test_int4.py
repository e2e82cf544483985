"""INT4 weights: rounding by groups, and shards that share a group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.quantize import Precision, quantize
from llmc.builder.pipeline import CompileOptions, run
from llmc.builder.trace import trace_model
from llmc.builder.verify import Verifier, rms
from llmc.builder.weights.cut import picked, sliced
from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.int4 import int4_scale, int4_zero, quantize_int4
from llmc.builder.weights.recipe import Recipe, parse
from llmc.plugins.linear import dequantize
from llmc.tiny import VOCAB
from llmc.tiny_model import random_model
from tests.models import tiny_config, tiny_model
from tests.unit.builder.weights_of import model_tensors, params_of

_SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 16, "intermediate_size": 88, "max_position_embeddings": 256}  # fmt: skip
TEXT = "int4(load('w'), int4_scale(load('w')), int4_zero(load('w')))"


class Weight:
    """One tensor as a source."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        return self.value[start:stop]

    stored = read

    def buffer(self, name: str) -> np.ndarray:
        raise AssertionError(name)


def rounded(value: np.ndarray) -> np.ndarray:
    scale, zero = int4_scale(value), int4_zero(value)
    return dequantize(quantize_int4(value, scale, zero), scale, zero)


@given(seed=st.integers(0, 99), columns=st.integers(1, 400), size=st.sampled_from([1e-3, 1.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_no_number_is_further_from_its_own_than_a_step(seed: int, columns: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    value = (rng.standard_normal((5, columns)) + rng.integers(-3, 4, (5, 1))).astype(np.float32) * np.float32(size)
    value[1] = 0
    step = int4_scale(value).astype(np.float32)[:, np.arange(columns) // 128]
    error = np.abs(rounded(value) - value)
    assert (error <= step * 1.01).all()  # half a step, and half a one where the zero point was rounded
    assert (rounded(value)[1] == 0).all()


def test_numbers_beyond_f16_are_stored_as_near_as_it_goes() -> None:
    assert (rounded(np.full((1, 4), 1e-12, np.float32)) == 0).all()
    assert np.isfinite(rounded(np.array([[1e9, -1e9]], np.float32))).all()


@pytest.mark.parametrize(
    "part",
    [
        lambda r: sliced(r, 0, 3, 17),
        lambda r: sliced(r, 1, 40, 290),
        lambda r: picked(r, [0, 1, 2, 8, 9, 10]),
        lambda r: sliced(picked(r, [5, 1, 9]), 0, 1, 3),
    ],
)
def test_a_cut_weight_has_the_numbers_of_the_whole(part: object) -> None:
    whole, source = parse(TEXT), Weight(np.random.default_rng(0).standard_normal((20, 300)).astype(np.float32))
    assert callable(part)
    cut: Recipe = part(whole)
    index = part(parse("load('i')"))
    numbers = np.arange(20 * 300).reshape(20, 300)
    expected = evaluate(whole, source).reshape(-1)[evaluate(index, Weight(numbers)).astype(np.int64)]
    assert parse(str(cut)) == cut
    assert infer(cut, lambda leaf: (20, 300)).dtype == "u4"
    np.testing.assert_array_equal(evaluate(cut, source), expected)


def graph_of(lines: str) -> Graph:
    head = "%ids: i32[T] = input() {name='ids'}\n%rows: i32[S] = input() {name='rows'}\n"
    graph = parse_graph(f"graph layer rank=0 tp=1 {{\n{head}{lines}\n}}\n", attrs_of)
    graph.validate(ALL)
    return graph


def test_linears_get_numbers_scales_and_zero_points() -> None:
    before = graph_of("""
        %e: f32[64,200] = param() {recipe="load('embed')"}
        %w: f32[32,200] = param() {recipe="load('up')"}
        %b: f32[32] = param() {recipe="load('up.bias')"}
        %h: f32[64,32] = param() {recipe="load('head')"}
        %x: f32[T,200] = embedding(%ids, %e) @embed
        %u: f32[T,32] = linear(%x, %w, %b) {bias=True} @layers.0.up
        %l: f32[T,64] = linear(%u, %h) {bias=False} @head
        return %l""")
    after, report = quantize(before, Precision("int4"))
    after.validate(ALL)
    made = {node.path: node for node in after if node.op == "linear"}
    types = after.types()
    assert [str(types[name]) for name in made["layers.0.up"].inputs] == [
        "f32[T,200]", "u4[32,200]", "f16[32,2]", "u4[32,2]", "f32[32]",
    ]  # fmt: skip
    recipes = [after.producers()[name].attrs.recipe for name in made["layers.0.up"].inputs[1:4]]
    scale, zero = "int4_scale(load('up'))", "int4_zero(load('up'))"
    assert recipes == [f"int4(load('up'), {scale}, {zero})", scale, zero]
    assert str(types[made["head"].inputs[1]]) == "bf16[64,32]"
    assert report.matched == 3


def test_experts_get_the_same_by_matrix() -> None:
    before = graph_of("""
        %e: f32[64,200] = param() {recipe="load('embed')"}
        %w: f32[4,16,200] = param() {recipe="load('experts')"}
        %i: i32[T,2] = input() {name='index'}
        %x: f32[T,200] = embedding(%ids, %e) @embed
        %y: f32[T,2,16] = grouped_linear(%x, %i, %w) {bias=False} @layers.0.experts
        return %y""")
    after, _ = quantize(before, Precision("int4"))
    after.validate(ALL)
    types, node = after.types(), next(node for node in after if node.op == "grouped_linear")
    assert [str(types[name]) for name in node.inputs[2:]] == ["u4[4,16,200]", "f16[4,16,2]", "u4[4,16,2]"]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_shards_of_experts_compute_what_the_whole_does(tp: int) -> None:
    """Of 200 columns between an expert's matrices a rank's first group is whole, or partly on another rank."""
    shape = {"hidden_size": 64, "moe_intermediate_size": 200, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", **_SIZES, **shape)
    traced = trace_model(config)
    params = params_of(model_tensors(random_model(config, 0), traced.buffers))
    verifier = Verifier(params)
    result = run(traced.graph, CompileOptions(precision="int4", tp=tp, verifier=verifier))
    experts = [[node for node in graph if node.op == "grouped_linear"] for graph in result.graphs]
    assert all(
        graph.types()[n.inputs[2]].dtype == "u4" for graph, ns in zip(result.graphs, experts, strict=True) for n in ns
    )
    deviations = dict(verifier.deviations)
    assert tp == 1 or deviations["shard"] < 1e-5
    assert {n.attrs.group_start for nodes in experts for n in nodes} == {1: {0}, 2: {0}, 3: {0, 64}}[tp]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_shards_compute_what_the_whole_does(tp: int) -> None:
    """Of 9 heads of 32 and 300 columns a rank's first group is whole, or partly on another rank."""
    shape = {"hidden_size": 288, "intermediate_size": 300}
    traced = trace_model(tiny_config("llama", **shape))
    params = params_of(model_tensors(tiny_model("llama", **shape), traced.buffers))
    verifier = Verifier(params)
    result = run(traced.graph, CompileOptions(precision="int4", tp=tp, verifier=verifier))
    deviations = dict(verifier.deviations)
    assert 0.01 < deviations["quantize"] < 0.5
    assert tp == 1 or deviations["shard"] < 1e-5
    starts = {node.attrs.group_start for graph in result.graphs for node in graph if node.op == "linear"}
    assert starts == {1: {0}, 2: {0, 64}, 3: {0, 64, 96}}[tp]
    assert rms(verifier.results(result.graphs)[0]) > 0
