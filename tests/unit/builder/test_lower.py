"""Lowering: views become strides, weights are placed and shared, logits go to their columns, nothing overlaps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.builder.arena import ALIGN
from llmc.builder.cpu.emit import emit
from llmc.builder.cpu.lower import lower
from llmc.builder.cpu.program import CpuLowered, CpuRank, Launch, Place
from llmc.builder.ir import Graph, GraphError, parse_graph
from llmc.builder.memory import memory_plan
from llmc.builder.operators import attrs_of
from llmc.profiles import load_target

PROFILE = ShapeProfile("p", (TokenRange(1, 1, 1), TokenRange(2, 8, 32)), 4, 64, 16)
HEADS = "layer=0, heads=2, kv_heads=1, head_dim=16"
#: One rank of a layer that is divided in two; {v} is the rank's columns of the vocabulary of 100.
TEXT = """graph tiny rank={rank} tp=2 {{
  %ids: i32[T] = input() {{name='ids'}}
  %positions: i32[T] = input() {{name='positions'}}
  %rows: i32[S] = input() {{name='rows'}}
  %table: bf16[100,32] = param() {{recipe="cast(load('e'), 'bf16')"}} @embed
  %x: f32[T,32] = embedding(%ids, %table) @embed
  %wqkv: f32[64,32] = param() {{recipe="slice(load('qkv'), 0, {q}, {q64})"}} @layers.0.attn
  %qkv: f32[T,64] = linear(%x, %wqkv) @layers.0.attn
  %q: f32[T,32] = slice(%qkv) {{axis=1, start=0, stop=32, step=1}} @layers.0.attn
  %k: f32[T,16] = slice(%qkv) {{axis=1, start=32, stop=48, step=1}} @layers.0.attn
  %v: f32[T,16] = slice(%qkv) {{axis=1, start=48, stop=64, step=1}} @layers.0.attn
  %r: f32[T,2,16] = rope_cache(%q, %k, %v) {{{heads}, rotary=0, style='half', qk_norm_eps=None}} @layers.0.attn
  %a: f32[T,32] = paged_attention(%r) {{{heads}, scale=0.25, window=8, softcap=None}} @layers.0.attn
  %wo: f32[32,32] = param() {{recipe="slice(load('o'), 1, {q}, {q32})"}} @layers.0.attn.o
  %o: f32[T,32] = linear(%a, %wo) {{all_reduce=True}} @layers.0.attn.o
  %g: f32[32] = param() {{recipe="load('norm')"}} @norm
  %s, %y: f32[T,32], f32[T,32] = rms_norm(%o, %g, %x) {{eps=1e-06, residual=True}} @norm
  %h: f32[S,32] = select_rows(%y, %rows)
  %head: bf16[{v},32] = param() {{recipe="cast(slice(load('e'), 0, {first}, {last}), 'bf16')"}} @head
  %logits: f32[S,{v}] = linear(%h, %head) @head
  return %logits
}}"""
VOCAB = ((0, 64), (64, 36))


def graph(rank: int) -> Graph:
    first, count = VOCAB[rank]
    q = 64 * rank
    numbers = {"rank": rank, "v": count, "first": first, "last": first + count, "q": q, "q32": q + 32, "q64": q + 64}
    return parse_graph(TEXT.format(heads=HEADS, **numbers), attrs_of)


@pytest.fixture(scope="module")
def lowered() -> CpuLowered:
    return lower([graph(0), graph(1)], PROFILE, load_target("cpu"), "bf16", VOCAB)


def launch(program: CpuRank, op: str, number: int = 0, index: int = 1) -> Launch:
    return [entry for entry in program.ranges[index].launches if entry.node.op == op][number]


def test_columns_of_a_merged_projection_are_pointers_with_a_row_stride(lowered: CpuLowered) -> None:
    program = lowered.programs[0]
    source = launch(program, "linear").outputs[0]
    q, k, v = launch(program, "rope_cache").inputs
    assert (source.space, source.stride) == ("arena", 64)
    assert [(p.offset - source.offset, p.stride) for p in (q, k, v)] == [(0, 64), (4 * 32, 64), (4 * 48, 64)]


def test_each_rank_writes_its_columns_of_the_logits_in_place(lowered: CpuLowered) -> None:
    places = [launch(p, "linear", -1).outputs[0] for p in lowered.programs]
    assert places == [Place("logits", 0, 100), Place("logits", 4 * 64, 100)]
    assert [p.vocab for p in lowered.programs] == list(VOCAB)
    assert lowered.vocab_size == 100


def test_what_ranks_store_alike_is_shared_and_the_rest_is_their_own(lowered: CpuLowered) -> None:
    assert {p.recipe for p in lowered.shared.placements} == {"cast(load('e'), 'bf16')", "load('norm')"}
    own = [[p.recipe for p in program.weights.placements] for program in lowered.programs]
    assert own[0] == [
        "panels(slice(load('qkv'), 0, 0, 64), 64)",
        "panels(slice(load('o'), 1, 0, 32), 64)",
        "panels(cast(slice(load('e'), 0, 0, 64), 'bf16'), 64)",
    ]
    assert len(own[1]) == 3
    for member in (lowered.shared, *(p.weights for p in lowered.programs)):
        end = 0
        for placement in member.placements:
            assert placement.offset % ALIGN == 0
            assert placement.offset >= end
            end = placement.offset + placement.nbytes
        assert end <= member.nbytes
    # The panel of 36 outputs is as large as one of 64.
    assert lowered.programs[1].weights.placements[-1].nbytes == 64 * 32 * 2


def test_the_cache_table_says_where_each_layer_lies(lowered: CpuLowered) -> None:
    (layer,) = lowered.programs[0].kv_layers
    assert (layer.layer, layer.kv_heads, layer.head_dim, layer.dtype, layer.window) == (0, 1, 16, "bf16", 8)
    assert (layer.offset, layer.nbytes) == (0, 2 * 16 * 16 * 2)
    assert lowered.programs[0].kv_block_bytes == layer.nbytes


def test_ranks_share_memory_for_the_widest_all_reduce(lowered: CpuLowered) -> None:
    assert lowered.slot_bytes == 32 * 32 * 4
    assert lowered.comm_bytes == 4096 + 2 * 2 * lowered.slot_bytes


@pytest.mark.parametrize("index", [0, 1])
def test_no_launch_writes_over_what_is_still_read(lowered: CpuLowered, index: int) -> None:
    for program in lowered.programs:
        code = program.ranges[index]
        sizes = {"T": code.tokens.max, "S": code.rows}
        alive: dict[str, range] = {}
        for number, entry in enumerate(code.launches):
            wanted = set().union(*(_roots(program, later) for later in code.launches[number:]))
            alive = {name: span for name, span in alive.items() if name in wanted}
            for name, place, kind in zip(entry.node.outputs, entry.outputs, entry.node.types, strict=True):
                if place.space != "arena":
                    continue
                span = range(place.offset, place.offset + kind.nbytes(**sizes))
                assert span.stop <= code.arena_bytes
                for other, taken in alive.items():
                    assert span.stop <= taken.start or taken.stop <= span.start, (name, other)
                alive[name] = span


def _roots(program: CpuRank, entry: Launch) -> set[str]:
    """The computed values that a launch reads, through views."""
    producers, found = program.graph.producers(), set()
    for name in entry.node.inputs:
        while producers[name].op in ("slice", "reshape"):
            name = producers[name].inputs[0]
        found.add(name)
    return found


def test_small_steps_have_a_small_arena(lowered: CpuLowered) -> None:
    small, large = lowered.programs[0].ranges
    assert small.arena_bytes * 8 < large.arena_bytes == lowered.programs[0].arena_bytes


def test_the_arithmetic_is_the_sum_of_what_was_placed(lowered: CpuLowered) -> None:
    memory = memory_plan(lowered, "tiny", "bf16")
    assert memory.weights_bytes == lowered.shared.nbytes + sum(p.weights.nbytes for p in lowered.programs)
    assert memory.kv_block_bytes == sum(p.kv_block_bytes for p in lowered.programs) == 2 * 1024
    assert [r.kv_bytes_per_token for r in memory.ranks] == [64, 64]
    assert memory.blocks_in(10 * 2048 + 2047) == 10
    assert memory.blocks_per_sequence == 4
    assert memory.logits_bytes == 4 * 100 * 4
    text = "\n".join(memory.lines())
    assert "KV of a token           128 B (by rank: 64, 64)" in text
    assert "64 tokens, 4 blocks" in text


def test_the_code_names_every_module_and_is_always_the_same(lowered: CpuLowered) -> None:
    files = emit(lowered, 1)
    assert files == emit(lower([graph(0), graph(1)], PROFILE, load_target("cpu"), "bf16", VOCAB), 1)
    assert sorted(files) == ["engine.h", "limits.h", "step_0.cpp", "step_1.cpp"]
    for path in ("embed", "layers.0.attn", "layers.0.attn.o", "norm", "head"):
        assert f"// {path}: " in files["step_0.cpp"]
    assert "const int64_t T = 1," in files["step_0.cpp"]
    assert "const int64_t T = c.step->num_tokens," in files["step_1.cpp"]
    assert "c.step->logits + 64, int64_t(100))" in files["step_1.cpp"]
    assert str(Path.cwd()) not in "".join(files.values())


def test_where_every_rank_computes_all_logits_the_first_one_writes_them() -> None:
    text = TEXT.replace("slice(load('e'), 0, {first}, {last})", "load('e')").replace("{v}", "100")
    numbers = {"q": 0, "q32": 32, "q64": 64, "heads": HEADS}
    graphs = [parse_graph(text.format(rank=r, **numbers), attrs_of) for r in range(2)]
    found = lower(graphs, PROFILE, load_target("cpu"), "bf16", ((0, 100), (0, 100)))
    assert [launch(p, "linear", -1).outputs[0].space for p in found.programs] == ["logits", "arena"]
    assert [p.vocab for p in found.programs] == [(0, 100), (0, 0)]


SMALL = """graph g rank=0 tp=1 {{
  %ids: i32[T] = input() {{name='ids'}}
  %rows: i32[S] = input() {{name='rows'}}
  %e: f32[100,32] = param() {{recipe="load('e')"}} @embed
  %x: f32[T,32] = embedding(%ids, %e) @embed
  %h: f32[S,32] = select_rows(%x, %rows)
  {body}
}}"""


def lower_small(body: str) -> CpuLowered:
    text = SMALL.format(body=body)
    return lower([parse_graph(text, attrs_of)], PROFILE, load_target("cpu"), "f32", ((0, 100),))


def test_one_weight_in_two_forms_is_stored_twice_and_in_one_form_once() -> None:
    body = """%a: f32[S,100] = linear(%h, %e) @head
  %b: f32[S,100] = linear(%h, %e) @head
  %c: f32[S,100] = pointwise(%a, %b) {expr='add(i0, i1)'} @sum
  return %c"""
    found = lower_small(body)
    assert [p.recipe for p in found.programs[0].weights.placements] == ["load('e')", "panels(load('e'), 64)"]
    assert found.shared.nbytes == found.comm_bytes == 0


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        (
            "%w: f32[100,32] = pointwise(%e) {expr='exp(i0)'} @made\n"
            "  %y: f32[S,100] = linear(%h, %w) @head\n  return %y",
            UnsupportedError,
            "linear @head: its weight is computed at run time",
        ),
        (
            "%y: f32[S,100] = linear(%h, %e) @head\n  %z: f32[S,100] = pointwise(%y) {expr='exp(i0)'}\n  return %y",
            GraphError,
            "%y is also an input",
        ),
        (
            "%y: f32[S,16] = slice(%h) {axis=1, start=0, stop=16, step=1} @cut\n  return %y",
            GraphError,
            "returned value %y is a view",
        ),
        (
            "%y: f32[S,16] = slice(%h) {axis=1, start=0, stop=16, step=1} @cut\n"
            "  %z: f32[S,4,4] = reshape(%y) {shape=('S', 4, 4)} @fold\n  return %z",
            GraphError,
            "reshape %z @fold: the rows of %y do not lie side by side",
        ),
    ],
)
def test_what_cannot_be_lowered_is_named(body: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        lower_small(body)


def test_block_sizes_that_kernels_lack_are_refused_with_the_module() -> None:
    odd = dataclasses.replace(PROFILE, block_size=24)
    with pytest.raises(UnsupportedError, match=r"paged_attention @layers\.0\.attn: block_size=24 is not one of 16"):
        lower([graph(0), graph(1)], odd, load_target("cpu"), "bf16", VOCAB)
