"""Lowering for a GPU: what readers round is stored narrow, nothing overlaps, every argument has a place of its own.

The launches here are made up, one parameter for each input and output: what lowering does depends on no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest

from llmc.artifacts.cuda_program import (
    VERSION,
    Address,
    AllReduce,
    Int,
    Product,
    Symbol,
    decode_program,
    encode_program,
)
from llmc.artifacts.errors import PlanError, UnsupportedError
from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.artifacts.types import TensorType
from llmc.builder.arena import ALIGN
from llmc.builder.cuda import code
from llmc.builder.cuda import lower as module
from llmc.builder.cuda.code import rank_program, variants
from llmc.builder.cuda.cubin import Cubin, Parameter, Resources
from llmc.builder.cuda.lower import lower
from llmc.builder.cuda.program import BoundCall, BoundReduce, CudaLowered, CudaRank, StepCode
from llmc.builder.cuda.variant import Variant
from llmc.builder.ir import parse_graph
from llmc.builder.memory import memory_plan
from llmc.builder.operators import attrs_of
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Collective, CudaCall, CudaEnv, Pool, StepArray, Temporary
from llmc.plugins.cuda.call import Symbol as StepSymbol
from llmc.profiles import CudaTarget, load_target
from tests.unit.builder.test_lower import VOCAB, graph

PROFILE = ShapeProfile("p", (TokenRange(1, 1, 1), TokenRange(2, 8, 32)), 4, 64, 16)
#: Operator -> inputs that its made-up kernel rounds.
NARROW = {"linear": {0}, "paged_attention": {0}}
#: So many elements a token, in launches of attention.
PARTIALS = 48


def target(name: str = "cuda:sm_90") -> CudaTarget:
    found = load_target(name)
    assert isinstance(found, CudaTarget)
    return found


def made_up(op: str) -> Callable[..., tuple[CudaCall | Collective, ...]]:
    def launch(attrs: Any, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv) -> Any:
        args: dict[str, Any] = {f"in{i}": Pointer("in", i) for i in range(len(inputs))}
        args |= {f"out{i}": Pointer("out", i) for i in range(len(outputs))}
        args |= {f"in{i}_stride": RowStride("in", i) for i, kind in enumerate(inputs) if kind.rank == 2}
        if op == "paged_attention":
            args |= {
                "pool": Pool(attrs.layer, 64, env.kv_dtype),
                "lengths": StepArray("context_len"),
                "stride": StepSymbol("table_stride"),
                "most": StepSymbol("max_context"),
                "partials": Temporary("partials", "f32", (Product(("T", PARTIALS)),)),
            }
        call = CudaCall(
            kernel="generated:kernel",
            source=f"def kernel({', '.join(args)}):\n    pass\n",
            args=args,
            constexprs={},
            grid=((Product((outputs[0].shape[0],)),),),
            narrow=frozenset(NARROW.get(op, set())),
        )
        return (call, *([Collective(0)] if getattr(attrs, "all_reduce", False) else []))

    return launch


@pytest.fixture(scope="module")
def lowered() -> Iterator[CudaLowered]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cuda_launch", made_up)
        yield lower([graph(0), graph(1)], PROFILE, target(), "bf16", VOCAB)


def call(steps: StepCode, op: str, number: int = 0) -> BoundCall:
    return [x for x in steps.launches if isinstance(x, BoundCall) and x.node.op == op][number]


def argument(bound: BoundCall, name: str) -> Any:
    return bound.args[bound.variant.arguments.index(name)]


def test_decode_comes_first_and_then_a_kind_for_each_token_range(lowered: CudaLowered) -> None:
    kinds = [(s.decode, s.least, s.most, s.rows) for s in lowered.programs[0].steps]
    assert kinds == [(True, 1, 4, 4), (False, 1, 1, 1), (False, 2, 32, 4)]


def test_what_every_reader_rounds_is_stored_narrow_and_nothing_else(lowered: CudaLowered) -> None:
    for steps in lowered.programs[0].steps:
        stored = {name: dtype for name, (_, dtype) in steps.values.items()}
        # x is read by a linear, and by a norm as residual; o is summed over ranks; y by a select_rows.
        assert stored == {"x": "f32", "qkv": "f32", "r": "bf16", "a": "bf16", "o": "f32", "s": "f32", "y": "f32",
                          "h": "bf16", "logits": "f32"}  # fmt: skip
        types = dict(call(steps, "linear", 1).variant.signature)
        assert types["in0"] == "*bf16"
        assert types["out0"] == "*fp32"


def test_columns_of_a_merged_projection_are_pointers_with_a_row_stride(lowered: CudaLowered) -> None:
    steps = lowered.programs[0].steps[2]
    source = steps.values["qkv"][0].offset
    rope = call(steps, "rope_cache")
    assert [argument(rope, f"in{i}").offset - source for i in range(3)] == [0, 4 * 32, 4 * 48]
    assert [argument(rope, f"in{i}_stride") for i in range(3)] == [Int(64)] * 3


def test_each_rank_has_its_columns_of_the_logits_side_by_side(lowered: CudaLowered) -> None:
    for program in lowered.programs:
        for steps in program.steps:
            assert argument(call(steps, "linear", -1), "out0") == Address("logits", 0)
    assert [p.vocab for p in lowered.programs] == list(VOCAB)


def test_step_arrays_pools_and_symbols(lowered: CudaLowered) -> None:
    steps = lowered.programs[1].steps[0]
    attention = call(steps, "paged_attention")
    assert argument(call(steps, "embedding"), "in0") == Address("ids", 0)
    assert argument(attention, "pool") == Address("kv", 64)
    assert argument(attention, "lengths") == Address("context_len", 0)
    assert argument(attention, "stride") == Int(64 // 16)
    assert argument(attention, "most") == Symbol("max_context")


def test_ranks_sum_where_the_partial_lies(lowered: CudaLowered) -> None:
    for program in lowered.programs:
        for steps in program.steps:
            (found,) = [x.what for x in steps.launches if isinstance(x, BoundReduce)]
            assert (found.at, found.count, found.dtype) == (steps.values["o"][0], Product(("T", 32)), "f32")


def test_the_cache_holds_keys_then_values_of_each_layer(lowered: CudaLowered) -> None:
    (layer,) = lowered.programs[0].kv_layers
    assert (layer.offset, layer.nbytes, layer.dtype) == (0, 2 * 16 * 16 * 2, "bf16")
    assert lowered.programs[0].kv_block_bytes == layer.nbytes


def _extents(steps: StepCode) -> list[list[tuple[int, int]]]:
    """Of each launch, the parts of the arena that its pointers lead to."""
    return [
        [
            (arg.offset, arg.offset + size)
            for arg, size in zip(x.args, x.buffers, strict=True)
            if isinstance(arg, Address) and arg.space == "arena" and size is not None
        ]
        for x in steps.launches
        if isinstance(x, BoundCall)
    ]


def test_no_launch_writes_what_it_or_a_later_one_reads(lowered: CudaLowered) -> None:
    for steps in lowered.programs[0].steps:
        assert all(end <= steps.arena_bytes for parts in _extents(steps) for _, end in parts)
        assert all(a.offset % ALIGN == 0 for a, _ in steps.values.values())
        owner: dict[int, str] = {}  # byte -> the value that was written there last
        types = lowered.programs[0].types
        for bound in (x for x in steps.launches if isinstance(x, BoundCall)):
            for i, name in enumerate(bound.node.inputs):
                place = argument(bound, f"in{i}")
                if place.space == "arena" and name in steps.values:
                    nbytes = types[name].size(T=steps.most, S=steps.rows) * (
                        2 if steps.values[name][1] == "bf16" else 4
                    )
                    assert {owner[byte] for byte in range(place.offset, place.offset + nbytes)} == {name}
            written = [
                (argument(bound, name), size, name)
                for name, size in zip(bound.variant.arguments, bound.buffers, strict=True)
                if size is not None and name.startswith(("out", "partials")) and argument(bound, name).space == "arena"
            ]
            for (a, size_a, _), (b, size_b, _) in combinations(written, 2):
                assert a.offset + size_a <= b.offset or b.offset + size_b <= a.offset
            for place, size, name in written:
                value = bound.node.outputs[int(name[3:])] if name.startswith("out") else name
                owner |= dict.fromkeys(range(place.offset, place.offset + size), value)


def test_what_the_launches_of_a_node_share_has_room_for_the_largest_step(lowered: CudaLowered) -> None:
    for steps in lowered.programs[0].steps:
        attention = call(steps, "paged_attention")
        assert attention.buffers[attention.variant.arguments.index("partials")] == 4 * PARTIALS * steps.most


def cubin(number: int, arguments: tuple[str, ...]) -> Cubin:
    return Cubin(b"cubin %d" % number, "kernel", 4, 1, 1024, (*arguments, "global_scratch", "profile_scratch"))


def table(variant: Variant) -> Resources:
    """What a cubin of the variant would say of itself."""
    kinds = [kind for _, kind in variant.signature if kind != "constexpr"]
    sizes = [8 if kind.startswith("*") else 4 for kind in kinds] + [8, 8]
    return Resources("kernel", tuple(Parameter(0, size) for size in sizes), 32, 0, 0, 128)


def test_a_program_is_data_that_reads_back(lowered: CudaLowered, monkeypatch: pytest.MonkeyPatch) -> None:
    cubins = {v: cubin(i, v.arguments) for i, v in enumerate(variants(lowered))}
    tables = {made.code: table(variant) for variant, made in cubins.items()}
    monkeypatch.setattr(code, "resources", tables.__getitem__)
    program = rank_program(lowered, lowered.programs[1], cubins)
    data = encode_program(program)
    assert decode_program(data, "here") == program
    for steps in program.steps:
        for launch in steps.launches:
            if not isinstance(launch, AllReduce):
                assert len(launch.args) == len(program.kernels[launch.kernel].parameters)
                assert launch.args[-2:] == (Address("null"), Address("null"))
    newer = data.replace(f'"version":{VERSION}'.encode(), f'"version":{VERSION + 1}'.encode())
    words = f"here: is a program of version {VERSION + 1}, this llmc reads version {VERSION}; update llmc"
    with pytest.raises(PlanError, match=words):
        decode_program(newer, "here")
    with pytest.raises(PlanError, match="here: is not a program for a GPU"):
        decode_program(data[:-100], "here")


def test_the_arithmetic_is_the_sum_of_what_was_placed(lowered: CudaLowered) -> None:
    memory = memory_plan(lowered, "tiny", "bf16")
    assert memory.weights_bytes == lowered.shared.nbytes + sum(p.weights.nbytes for p in lowered.programs)
    assert [r.arena_bytes for r in memory.ranks] == [max(s.arena_bytes for s in p.steps) for p in lowered.programs]
    assert memory.target == "cuda:sm_90"


def small(body: str, kv_dtype: str = "bf16", name: str = "cuda:sm_90") -> CudaRank:
    text = "graph g rank=0 tp=1 {\n  %ids: i32[T] = input() {name='ids'}\n  %rows: i32[S] = input() {name='rows'}\n"
    return lower([parse_graph(f"{text}{body}\n}}", attrs_of)], PROFILE, target(name), kv_dtype, ((0, 8),)).programs[0]


def test_an_operator_without_kernels_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cuda_launch", lambda op: None if op == "select_rows" else made_up(op))
    body = """  %t: f32[9,8] = param() {recipe="load('t')"} @embed
  %x: f32[T,8] = embedding(%ids, %t) @embed
  %y: f32[S,8] = select_rows(%x, %rows) @model.last
  return %y"""
    with pytest.raises(UnsupportedError, match=r"select_rows @model\.last: cuda:sm_90 has no kernel for it"):
        small(body)


def test_fp8_is_refused_for_gpus_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cuda_launch", made_up)
    body = """  %t: f32[9,8] = param() {recipe="load('t')"} @embed
  %w: f8e4m3[8,8] = param() {recipe="fp8(load('w'))"} @head
  %s: f32[8] = param() {recipe="fp8_scale(load('w'))"} @head
  %x: f32[T,8] = embedding(%ids, %t) @embed
  %y: f32[T,8] = linear(%x, %w, %s) @head
  %z: f32[S,8] = select_rows(%y, %rows) @model.last
  return %z"""
    with pytest.raises(UnsupportedError, match=r"linear @head: cuda:sm_80 has no FP8; .* or a target from sm_89 on"):
        small(body, name="cuda:sm_80")


@pytest.mark.parametrize(
    ("name", "kv_dtype", "words"),
    [
        ("cuda:sm_90", "f32", "cannot be f32; choose --kv-cache-dtype bf16 or fp8"),
        ("cuda:sm_80", "f8e4m3", "cannot be f8e4m3; choose --kv-cache-dtype bf16$"),
    ],
)
def test_a_cache_that_the_target_has_not_is_refused(
    name: str, kv_dtype: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cuda_launch", made_up)
    with pytest.raises(UnsupportedError, match=words):
        lower([graph(0), graph(1)], PROFILE, target(name), kv_dtype, VOCAB)


def test_constants_stand_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cuda_launch", made_up)
    body = """  %t: f32[9,8] = param() {recipe="load('t')"} @embed
  %x: f32[T,8] = embedding(%ids, %t) @embed
  %c: f32[8] = const() {values=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)}
  %y: f32[T,8] = rms_norm(%x, %c) {eps=1e-06, residual=False} @norm
  %z: f32[S,8] = select_rows(%y, %rows)
  return %z"""
    program = small(body)
    assert argument(call(program.steps[0], "rms_norm"), "in1") == Address("constants", 0)
    assert len(program.constants) == ALIGN
    assert program.constants[4:8] == b"\x00\x00\x00\x40"
