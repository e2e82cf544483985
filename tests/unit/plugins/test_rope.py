"""rope_cache's kernel against its reference: what it returns and what it writes into the cache."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.plugins.cpu.call import KernelEnv
from llmc.plugins.operator import KVCache, StepContext
from llmc.plugins.paged_attention.cpu import layer_bytes
from llmc.plugins.rope_cache import Attrs, infer, reference
from llmc.plugins.rope_cache.cpu import launch
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.native_step import Launch, Rank, Step, build, pack, source, unpack

CASES = [
    (Attrs(0, 9, 3, 64, rotary=64), 16, "f32"),
    (Attrs(0, 4, 2, 80, rotary=32, qk_norm_eps=1e-6), 32, "bf16"),
    (Attrs(0, 2, 2, 24, rotary=8, style="interleaved"), 16, "bf16"),
    (Attrs(0, 4, 1, 20), 64, "f32"),
    (Attrs(0, 2, 1, 128, rotary=128, style="interleaved", qk_norm_eps=1e-5), 16, "f32"),
    (Attrs(0, 4, 2, 24, rotary=24, qk_norm_eps=1e-5, norm_last=True, v_dim=40), 16, "f32"),
    (Attrs(0, 4, 2, 20, rotary=8, qk_norm_eps=1e-5, norm="layer", norm_scope="each", norm_bias=True), 16, "f32"),
    (Attrs(0, 6, 2, 24, rotary=24, qk_norm_eps=1e-6, norm_scope="all"), 16, "bf16"),
    (Attrs(0, 3, 1, 32, rotary=32, qk_norm_eps=1e-6, norm_scope="all", norm_means=True), 16, "f32"),
    (Attrs(0, 4, 4, 16, qk_norm_eps=1e-5, norm="layer", norm_last=True, norm_bias=True), 16, "f32"),
    (Attrs(0, 4, 2, 24, rotary=24, kv_scales=((0.01, 0.3), (2.0, 0.004))), 16, "f8e4m3"),
    (Attrs(0, 3, 3, 20, v_dim=36, kv_scales=((1.0, 0.5, 0.25), (1.0, 0.5, 0.3))), 32, "f8e4m3"),
]


def types_of(a: Attrs) -> tuple[TensorType, ...]:
    widths = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim]
    shapes: list[tuple[Dim, ...]] = [("T", w) for w in widths + [a.rotary] * (2 * bool(a.rotary))]
    if a.has_norm:
        shapes += [(w if a.norm_scope != "head" else a.head_dim,) for w in widths[:2]] * (1 + a.norm_bias)
    shapes += [("T", 2)] * a.norm_means
    return tuple(TensorType("f32", shape) for shape in shapes)


def _launch(case: tuple[Attrs, int, str]) -> Launch:
    a, block_size, dtype = case
    size = layer_bytes(a.kv_heads, a.head_dim, a.value_dim, block_size, dtype)
    env = KernelEnv((1, 64), (1, 8), 1, block_size, dtype, size, {a.layer: 0}, 8, 256)
    outputs = infer(a, types_of(a))
    return Launch(launch(a, types_of(a), outputs, env), types_of(a), outputs)


def launches() -> list[Launch]:
    return [_launch(case) for case in CASES]


@functools.cache
def compiled() -> dict[str, ctypes.CDLL]:
    return build(source(launches()))


@pytest.fixture(autouse=True, scope="module")
def _compile_first() -> None:
    compiled()


def make_step(lengths: Sequence[tuple[int, int]], block_size: int, rng: np.random.Generator) -> tuple[Step, int]:
    """A step of (tokens before, tokens in it), and how many blocks it uses."""
    needed = [-(-sum(pair) // block_size) for pair in lengths]
    tables = np.full((len(lengths), max(needed)), -(2**30), np.int32)
    order = rng.permutation(sum(needed)).astype(np.int32)
    for s, count in enumerate(needed):
        tables[s, :count], order = order[:count], order[count:]
    starts = np.cumsum([0] + [new for _, new in lengths]).astype(np.int32)
    return Step(starts, np.array([sum(pair) for pair in lengths], np.int32), tables), sum(needed)


def make_inputs(a: Attrs, tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """q, k, v as column ranges of one wider array, as a merged projection leaves them."""
    width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
    merged = rng.standard_normal((tokens, width + kv_width + a.kv_heads * a.value_dim)).astype(np.float32)
    inputs = [merged[:, :width], merged[:, width : width + kv_width], merged[:, width + kv_width :]]
    if a.rotary:
        angles = rng.uniform(-4, 4, (tokens, a.rotary))
        inputs += [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
    shapes = [tuple(tokens if d == "T" else int(d) for d in t.shape) for t in types_of(a)[len(inputs) :]]
    inputs += [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes]
    return inputs


@pytest.mark.parametrize("index", range(len(CASES)))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    threads=st.integers(1, 5),
)
@settings(max_examples=12, deadline=None)
def test_matches_reference(index: int, lengths: list[tuple[int, int]], seed: int, threads: int) -> None:
    (a, block_size, dtype), rng = CASES[index], np.random.default_rng(seed)
    step, blocks = make_step(lengths, block_size, rng)
    widths, shape = (a.head_dim, a.value_dim), (blocks, block_size, a.kv_heads)
    cache = KVCache(*(rng.standard_normal((*shape, width)).astype(NUMPY_DTYPES[dtype]) for width in widths))
    packed = pack(cache, dtype)
    tokens = int(step.query_start[-1])
    inputs = make_inputs(a, tokens, rng)
    context = StepContext(block_size, step.query_start, step.context_len, step.block_tables, {0: cache})
    want = reference(context, a, inputs)[0]
    results = []
    for isa in ISAS:
        held = packed.copy()
        rank = Rank(compiled()[isa], launches(), threads, held)
        out = np.full((tokens, a.heads, a.head_dim), np.nan, np.float32)
        assert rank.call(index, step, inputs, [out]) == 0
        rank.close()
        results.append((out.tobytes(), held.tobytes()))
        np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)
        got = unpack(held, block_size, a.kv_heads, widths, dtype)
        tolerance = {"f32": 2e-6, "bf16": 2**-7, "f8e4m3": 2**-3}[dtype]  # neighbours lie up to that far apart
        near = 2**-9 if dtype == "f8e4m3" else 2e-6
        np.testing.assert_allclose(got.keys.astype("f4"), cache.keys.astype("f4"), rtol=tolerance, atol=near)
        if not a.rotary and not a.has_norm:
            np.testing.assert_array_equal(got.keys, cache.keys)
        np.testing.assert_array_equal(got.values, cache.values)
    assert results[0] == results[-1]


TILED = [
    (Attrs(0, 4, 2, 64, rotary=32), 16, "bf16"),
    (Attrs(0, 3, 1, 32, rotary=32, v_dim=96), 64, "bf16"),
    (Attrs(0, 4, 2, 64, rotary=64, kv_scales=((0.01, 0.3), (2.0, 0.004))), 32, "f8e4m3"),
]


@pytest.mark.parametrize("case", TILED, ids=[f"{a.head_dim}-{size}-{dtype}" for a, size, dtype in TILED])
def test_with_amx_the_same_numbers_lie_as_tiles_do(case: tuple[Attrs, int, str]) -> None:
    (a, block_size, dtype), rng = case, np.random.default_rng(1)
    launches = [_launch(case)]
    step, blocks = make_step([(5, 60), (0, 3), (33, 1)], block_size, rng)
    inputs = make_inputs(a, int(step.query_start[-1]), rng)
    widths, held, outs = (a.head_dim, a.value_dim), {}, {}
    for isa in (ISAS[0], "x86-64-amx"):
        cache = KVCache(*(np.zeros((blocks, block_size, a.kv_heads, w), NUMPY_DTYPES[dtype]) for w in widths))
        packed, outs[isa] = pack(cache, dtype), np.zeros((len(inputs[0]), a.heads, a.head_dim), np.float32)
        rank = Rank(build(source(launches), (isa,))[isa], launches, 2, packed)
        assert rank.call(0, step, inputs, [outs[isa]]) == 0
        rank.close()
        held[isa] = unpack(packed, block_size, a.kv_heads, widths, dtype, tiles=isa == "x86-64-amx")
    np.testing.assert_array_equal(*outs.values())
    rows, tiles = held.values()
    for pair in ((rows.keys, tiles.keys), (rows.values, tiles.values)):
        one, other = (np.ascontiguousarray(x).view(np.uint8) for x in pair)
        np.testing.assert_array_equal(one, other)
        assert one.any()


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    a, block_size, _ = CASES[2]
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0x7F7FFFFF, 0x80000001], np.uint32)
    step = Step(np.array([0, 1], np.int32), np.array([1], np.int32), np.array([[0]], np.int32))
    inputs = make_inputs(a, 1, np.random.default_rng(0))
    inputs[2][0, : len(bits)] = bits.view(np.float32)
    held = pack(KVCache(*np.zeros((2, 1, block_size, a.kv_heads, a.head_dim))), "bf16")
    rank = Rank(compiled()[ISAS[0]], launches(), 1, held)
    rank.call(2, step, inputs, [np.zeros((1, a.heads, a.head_dim), np.float32)])
    rank.close()
    written = unpack(held, block_size, a.kv_heads, (a.head_dim, a.head_dim), "bf16").values[0, 0, 0, : len(bits)]
    assert written.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0x7F80, 0x8000]


def test_e4m3_rounds_to_nearest_even_saturates_and_keeps_nan() -> None:
    """Numbers from 2^-12 to 2^10 of both signs, those between two E4M3 numbers among them, infinities and NaN."""
    index = len(CASES) - 1
    a, block_size, dtype = CASES[index]
    rng = np.random.default_rng(3)
    numbers = np.arange(0x7F, dtype=np.uint8).view(NUMPY_DTYPES[dtype]).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    special = [0, 448, 464, 1e30, np.inf, np.nan, 1e-40, 2**-10, 2**-6]
    x = np.concatenate(
        [ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9), special, 2.0 ** rng.uniform(-12, 10, 200)]
    )
    tokens = 2 * len(x) // a.value_dim + 1
    rows = np.resize(np.concatenate([x, -x]), (tokens, 1, a.value_dim)).astype(np.float32)
    scales = np.array(a.kv_scales[1], np.float32)[:, None]  # type: ignore[index]
    inputs = make_inputs(a, tokens, rng)
    inputs[2] = (rows * scales).reshape(tokens, -1)
    step, blocks = make_step([(0, tokens)], block_size, rng)
    held = pack(KVCache(*(np.zeros((blocks, block_size, a.kv_heads, w)) for w in (a.head_dim, a.value_dim))), dtype)
    rank = Rank(compiled()[ISAS[0]], launches(), 1, held)
    rank.call(index, step, inputs, [np.zeros((tokens, a.heads, a.head_dim), np.float32)])
    rank.close()
    got = unpack(held, block_size, a.kv_heads, (a.head_dim, a.value_dim), dtype).values[step.block_tables[0]]
    want = np.clip(rows * scales / scales, -448, 448).astype(NUMPY_DTYPES[dtype])
    written = got.reshape(-1, a.kv_heads, a.value_dim)[:tokens]
    np.testing.assert_array_equal(written.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_scales": ((1.0, 1.0), (1.0, 1.0, 1.0))}, "kv_scales of keys"),
        ({"kv_scales": ((1.0, 1.0, 1.0), (1.0, float("nan"), 1.0))}, "kv_scales of values"),
        ({"kv_heads": 2}, "multiple"),
        ({"rotary": 7}, "rotary=7"),
        ({"rotary": 66}, "rotary=66"),
        ({"style": "both"}, "style 'both'"),
        ({"qk_norm_eps": 1e-6}, "expected"),
        ({"norm": "batch"}, "norm 'batch'"),
        ({"norm_scope": "all", "norm_last": True}, "before the rotation"),
        ({"norm_means": True}, "means are for"),
        ({"head_dim": 32, "rotary": 32}, "expected"),
    ],
)
def test_type_rule_names_the_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        infer(dataclasses.replace(CASES[0][0], **change), types_of(CASES[0][0]))  # type: ignore[arg-type]


def test_rotation_is_hugging_faces() -> None:
    """q * cos + rotate_half(q) * sin, as transformers' Llama writes it."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(3))
    cos, sin = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2))
    context = StepContext(
        16, np.array([0, 3]), np.array([3]), np.array([[0]]), {0: KVCache(*np.zeros((2, 1, 16, 1, 8), np.float32))}
    )
    out = reference(context, Attrs(0, 1, 1, 8, rotary=8), [q, k, v, cos, sin])[0]
    half = np.concatenate([-q[:, 4:], q[:, :4]], axis=1)
    np.testing.assert_allclose(out[:, 0], q * cos + half * sin, rtol=1e-6)
    np.testing.assert_array_equal(context.kv[0].values[0, :3, 0], v)
