"""What stops a build, and the tools that passes are written with."""

from __future__ import annotations

import pytest

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Ranges
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.builder.ir import Graph, layer_of, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.check_lowerable import check_lowerable
from llmc.builder.passes.fuse_rms_norm import fuse_rms_norm
from llmc.builder.passes.merge_linears import merge_qkv
from llmc.builder.passes.quantize import Precision, quantize
from llmc.builder.passes.rewrite import Edit, View, first, op
from llmc.builder.passes.rewrite import Value as V
from llmc.builder.pipeline import CompileOptions, run


def graph_of(lines: str) -> Graph:
    """A graph of these lines, checked."""
    graph = parse_graph(f"graph g rank=0 tp=1 {{\n{lines}\n}}", attrs_of)
    graph.validate(ALL)
    return graph


def norm(layer: int, source: str, result: str) -> str:
    """An RMS norm in primitives."""
    at = f"@layers.{layer}.norm"
    return f"""
  %s{layer}: f32[T,8] = pow({source}, %two) {at}
  %m{layer}: f32[T,1] = reduce(%s{layer}) {{kind='mean', axis=-1, keepdim=True}} {at}
  %v{layer}: f32[T,1] = add(%m{layer}, %eps) {at}
  %i{layer}: f32[T,1] = rsqrt(%v{layer}) {at}
  %n{layer}: f32[T,8] = mul({source}, %i{layer}) {at}
  {result}: f32[T,8] = mul(%w, %n{layer}) {at}"""


HEAD = """
  %x: f32[T,8] = input() {name='x'}
  %two: f32[] = const() {values=(2.0,)}
  %eps: f32[] = const() {values=(1e-05,)}
  %w: f32[8] = param() {recipe="load('w')"}"""


def test_a_layer_that_does_not_match_while_others_do_stops_the_build() -> None:
    graph = graph_of(HEAD + norm(0, "%x", "%a") + norm(1, "%a", "%c") + "\n  return %c")
    assert fuse_rms_norm(graph)[1].matched == 2
    odd = graph_of(HEAD + norm(0, "%x", "%a") + norm(1, "%a", "%c").replace("%w", "%x") + "\n  return %c")
    with pytest.raises(UnsupportedError, match=r"fuse_rms_norm matches 1 of 2 layers, not layers\.1\.norm"):
        fuse_rms_norm(odd)


def test_a_pattern_that_matches_nowhere_is_noted() -> None:
    graph = graph_of(HEAD + norm(0, "%x", "%a").replace("%w", "%x") + "\n  return %a")
    _, report = fuse_rms_norm(graph)
    assert (report.matched, report.expected) == (0, 1)
    assert report.notes == ("no match for layers.*.norm: runs as generic code",)


LINEAR = """
  %x: f32[T,8] = input() {name='x'}
  %rows: i32[S] = input() {name='rows'}
  %w: f32[4,8] = param() {recipe="load('w')"}
  %h: f32[8,4] = param() {recipe="load('h')"}
  %y: f32[T,4] = linear(%x, %w) {bias=False} @layers.0.up
  %l: f32[S,4] = select_rows(%y, %rows)
  %z: f32[S,8] = linear(%l, %h) {bias=False} @lm_head
  return %z"""


def _table(ranges: Ranges | None = None) -> CalibrationTable:
    data = CalibrationData("none", "0" * 64, 0, 0, 0)
    return CalibrationTable("0" * 64, "none", "max", data, {"layers.0.up": ranges} if ranges else {})


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (None, UsageError, "needs a calibration table"),
        (_table(), UnsupportedError, r"linear @layers\.0\.up: the calibration table has no entry"),
        (_table(Ranges(0.0, (1.0,))), UnsupportedError, r"linear @layers\.0\.up: input_amax is 0\.0"),
        (_table(Ranges(1e-44, (1.0,))), UnsupportedError, "too little for a float32 scale"),
    ],
)
def test_fp8_needs_a_table_that_fits(table: CalibrationTable | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(graph_of(LINEAR), Precision("fp8", table, "static"))


def test_per_token_fp8_needs_no_table() -> None:
    after, report = quantize(graph_of(LINEAR), Precision("fp8", activations="token"))
    after.validate(ALL)
    up, head = (node for node in after if node.op == "linear")
    assert (up.attrs.x_per_token, up.attrs.x_scale) == (True, None)
    assert after.types()[head.inputs[1]].dtype == "bf16"
    assert report.matched == 2


def test_fp32_leaves_the_graph_alone() -> None:
    graph = graph_of(LINEAR)
    assert quantize(graph, Precision("fp32"))[0] is graph


def test_an_operator_without_a_kernel_is_named_with_its_module() -> None:
    graph = graph_of(
        """
  %x: f32[T,8] = input() {name='x'}
  %y: f32[T,8,1] = reshape(%x) {shape=('T', 8, 1)} @layers.3.router
  %z: f32[T,1,8] = reshape(%x) {shape=('T', 1, 8)} @layers.3.router
  %t: f32[T,8,8] = matmul(%y, %z) @layers.3.router
  return %t"""
    )
    with pytest.raises(UnsupportedError, match=r"no kernel.*matmul \(in layers\.3\.router\)"):
        check_lowerable(graph)


def test_a_rule_that_a_graph_breaks_is_no_traceback() -> None:
    graph = graph_of(
        """
  %x: f32[T,8] = input() {name='x'}
  %two: f32[] = const() {values=(2.0,)}
  %c: f32[] = exp(%two) @layers.0.odd
  %y: f32[T,8] = mul(%x, %c) @layers.0.odd
  return %y"""
    )
    with pytest.raises(UnsupportedError, match=r"g, in pass fuse_pointwise: pointwise @layers\.0\.odd: inputs are "):
        run(graph, CompileOptions())


def test_merging_uneven_layers_stops_the_build() -> None:
    layer = """
  %q{i}: f32[T,8] = linear({x}, %w) {{bias=False}} @layers.{i}.attn.q_proj
  %k{i}: f32[T,8] = linear({y}, %w) {{bias=False}} @layers.{i}.attn.k_proj
  %v{i}: f32[T,8] = linear({x}, %w) {{bias=False}} @layers.{i}.attn.v_proj
  %r{i}: f32[T,1,8] = rope_cache(%q{i}, %k{i}, %v{i}) {{layer={i}, heads=1, kv_heads=1, head_dim=8}} @layers.{i}.attn
  %a{i}: f32[T,8] = paged_attention(%r{i}) {{layer={i}, heads=1, kv_heads=1, head_dim=8, scale=1.0}} @layers.{i}.attn"""
    head = "\n  %x: f32[T,8] = input() {name='x'}\n  %w: f32[8,8] = param() {recipe=\"load('w')\"}"
    same = layer.format(i=0, x="%x", y="%x")
    graph = graph_of(head + same + layer.format(i=1, x="%a0", y="%x") + "\n  return %a1")
    with pytest.raises(UnsupportedError, match=r"merge_qkv matches 1 of 2 layers, not layers\.1\.attn"):
        merge_qkv(graph)


def test_a_name_bound_twice_in_a_pattern_must_be_one_value() -> None:
    graph = graph_of(
        """
  %x: f32[T,8] = input() {name='x'}
  %s: f32[T,8] = sigmoid(%x)
  %y: f32[T,8] = mul(%s, %x)
  %z: f32[T,8] = mul(%s, %y)
  return %z"""
    )
    pattern, view = op("mul", V("x"), op("sigmoid", V("x"))), View(graph)
    assert first(view, pattern, "y") == {"x": "x"}
    assert first(view, pattern, "z") is None


def test_edit_orders_nodes_and_drops_what_nobody_reads() -> None:
    graph = graph_of(
        """
  %x: f32[T,8] = input() {name='x'}
  %unused: f32[T,8] = neg(%x)
  %early: f32[T,8] = neg(%x)
  %late: f32[T,8] = exp(%x)
  %y: f32[T,8] = add(%early, %late)
  return %y"""
    )
    edit = Edit(graph)
    node = graph.producers()["early"]
    edit.swap(node, edit.make("sqrt", ["late"], [node.type], like=node, outputs=["early"]))
    after = edit.finish()
    after.validate(ALL)
    assert [node.outputs[0] for node in after] == ["x", "late", "early", "y"]


def test_layer_numbers_come_from_paths() -> None:
    assert layer_of("model.layers.12.self_attn.q_proj") == 12
    assert layer_of("transformer.h.3") == 3
    assert layer_of("model.norm") is None
