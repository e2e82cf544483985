"""INT8 weights: rounding, cuts of recipes, the quantize pass, and shards that compute what the whole does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Choice, Ranges, RoundedFile, Smoothing
from llmc.artifacts.types import INT8_MAX
from llmc.builder.passes.quantize import Precision, quantize
from llmc.builder.pipeline import CompileOptions, run
from llmc.builder.trace import trace_model
from llmc.builder.verify import Verifier
from llmc.builder.weights.cut import picked, sliced
from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.int8 import int8_scale, quantize_int8
from llmc.builder.weights.recipe import parse
from tests.models import tiny_config, tiny_model
from tests.unit.builder.test_int4 import Weight, graph_of
from tests.unit.builder.weights_of import model_tensors, params_of

TEXT = "int8(load('w'), int8_scale(load('w')))"


@given(seed=st.integers(0, 99), columns=st.integers(1, 300), size=st.sampled_from([1e-44, 1e-3, 1.0, 1e37]))
@settings(max_examples=40, deadline=None)
def test_no_number_is_further_from_its_own_than_half_a_step(seed: int, columns: int, size: float) -> None:
    value = np.random.default_rng(seed).standard_normal((5, columns)).astype(np.float32) * np.float32(size)
    value[1] = 0
    scale = int8_scale(value)
    numbers = quantize_int8(value, scale)
    assert numbers.dtype == np.int8
    assert np.abs(numbers.astype(int)).max() <= INT8_MAX
    assert (scale > 0).all()
    off = np.abs(numbers.astype(np.float64) * scale[:, None] - value)
    assert (off <= 0.5 * scale[:, None].astype(np.float64) * (1 + 1e-4)).all()


@pytest.mark.parametrize("rows", [(0, 20), (3, 17)])
@pytest.mark.parametrize("columns", [(0, 300), (40, 291)])
def test_a_cut_weight_has_the_numbers_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    whole, source = parse(TEXT), Weight(np.random.default_rng(0).standard_normal((20, 300)).astype(np.float32))
    cut = sliced(sliced(whole, 0, *rows), 1, *columns)
    assert parse(str(cut)) == cut
    assert str(infer(whole, lambda leaf: (20, 300))) == "i8[20,300]"
    expected = evaluate(whole, source)[slice(*rows), slice(*columns)]
    np.testing.assert_array_equal(evaluate(cut, source), expected)
    chosen = picked(whole, [5, 1, 9])
    np.testing.assert_array_equal(evaluate(chosen, source), evaluate(whole, source)[[5, 1, 9]])


LAYER = """
    %e: f32[64,200] = param() {recipe="load('embed')"}
    %w: f32[32,200] = param() {recipe="load('up')"}
    %b: f32[32] = param() {recipe="load('up.bias')"}
    %h: f32[64,32] = param() {recipe="load('head')"}
    %x: f32[T,200] = embedding(%ids, %e) @embed
    %u: f32[T,32] = linear(%x, %w, %b) {bias=True} @layers.0.up
    %l: f32[T,64] = linear(%u, %h) {bias=False} @head
    return %l"""


def table(choice: Choice) -> CalibrationTable:
    data = CalibrationData("none", "0" * 64, 0, 0, 0)
    ranges = {"layers.0.up": Ranges(1.0, (1.0,) * 32, choice)}
    return CalibrationTable("0" * 64, "none", "", data, ranges, "token", 1.1, RoundedFile("t", "0"), weights="int8")


def test_linears_get_numbers_scales_and_rounded_inputs() -> None:
    after, report = quantize(graph_of(LAYER), Precision("int8"))
    made = {node.path: node for node in after if node.op == "linear"}
    types = after.types()
    assert [str(types[name]) for name in made["layers.0.up"].inputs] == [
        "f32[T,200]", "i8[32,200]", "f32[32]", "f32[32]",
    ]  # fmt: skip
    assert (made["layers.0.up"].attrs.x_per_token, made["layers.0.up"].attrs.x_factors) == (True, False)
    recipes = [after.producers()[name].attrs.recipe for name in made["layers.0.up"].inputs[1:3]]
    assert recipes == ["int8(load('up'), int8_scale(load('up')))", "int8_scale(load('up'))"]
    assert str(types[made["head"].inputs[1]]) == "bf16[64,32]"
    assert report.matched == 3


def test_the_table_says_what_is_smoothed_and_what_stays_bf16() -> None:
    smoothed = Choice(False, 1.0, 0.1, 0.01, Smoothing("layers.0.gate", 0.5))
    after, report = quantize(graph_of(LAYER), Precision("int8", table(smoothed)))
    node = next(node for node in after if node.path == "layers.0.up" and node.op == "linear")
    recipes = [after.producers()[name].attrs.recipe for name in node.inputs[1:4]]
    assert recipes == [
        "stored('layers.0.up.weight', 'i8')",
        "stored('layers.0.up.weight_scale', 'f32')",
        "stored('layers.0.gate.input_factors', 'f32')",
    ]
    assert node.attrs.x_factors
    assert "layers.0.up: 100.00 % of the loss of pure INT8, INT8" in report.notes
    kept = replace(smoothed, kept=True, smoothing=None)
    after, _ = quantize(graph_of(LAYER), Precision("int8", table(kept)))
    assert {str(t.dtype) for t in after.types().values()} == {"f32", "bf16", "i32"}


def test_experts_get_numbers_and_scales_and_no_factors() -> None:
    before = graph_of("""
        %e: f32[64,16] = param() {recipe="load('embed')"}
        %w: f32[4,16,16] = param() {recipe="load('experts')"}
        %i: i32[T,2] = input() {name='index'}
        %x: f32[T,16] = embedding(%ids, %e) @embed
        %y: f32[T,2,16] = grouped_linear(%x, %i, %w) {bias=False} @layers.0.experts
        return %y""")
    after, _ = quantize(before, Precision("int8"))
    (node,) = (node for node in after if node.op == "grouped_linear")
    types = after.types()
    assert [str(types[name]) for name in node.inputs] == ["f32[T,16]", "i32[T,2]", "i8[4,16,16]", "f32[4,16]"]
    assert node.attrs.x_per_token
    recipes = [after.producers()[name].attrs.recipe for name in node.inputs[2:]]
    assert recipes == ["int8(load('experts'), int8_scale(load('experts')))", "int8_scale(load('experts'))"]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_shards_compute_what_the_whole_does(tp: int) -> None:
    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 150}
    traced = trace_model(tiny_config("llama", **shape))
    params = params_of(model_tensors(tiny_model("llama", **shape), traced.buffers))
    verifier = Verifier(params)
    run(traced.graph, CompileOptions(precision="int8", tp=tp, verifier=verifier))
    deviations = dict(verifier.deviations)
    assert 0.001 < deviations["quantize"] < 0.1
    assert tp == 1 or 1e-4 < deviations["shard"] < 0.05  # each rank scales a token by its own columns
