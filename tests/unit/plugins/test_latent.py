"""The operators of latent attention against their references, and the same bits for any step, threads and ISA level."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.weights.evaluation import apply
from llmc.builder.weights.recipe import parse
from llmc.plugins import OPERATORS, cpu_launch
from llmc.plugins.cpu.call import KernelEnv
from llmc.plugins.latent_attention.cpu import layer_bytes, scratch_bytes
from llmc.plugins.operator import KVCache, StepContext
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.native_step import Launch, Rank, Step, build, source

MAX_CONTEXT = 800
MOST = 200


def launched(name: str, attrs: dict[str, Any], types: Sequence[str], block_size: int, dtype: str) -> Launch:
    operator = OPERATORS[name]
    values = operator.attrs(**attrs)
    inputs = tuple(map(TensorType.parse, types))
    outputs = operator.infer(values, inputs)
    stride = 192 + (layer_bytes(attrs["latent"], attrs["rope"], block_size, dtype) if "latent" in attrs else 0)
    env = KernelEnv((1, MOST), (1, 1), 1, block_size, dtype, stride, {0: 64}, 4, MAX_CONTEXT)
    return Launch(cpu_launch(name)(values, inputs, outputs, env), inputs, outputs)


#: heads, latent, rope, block size, cache dtype: one tile of many tokens, one token in several tiles, odd widths.
SHAPES = [(3, 20, 6, 16, "f32"), (16, 64, 16, 32, "bf16"), (40, 33, 8, 16, "bf16"), (1, 48, 2, 256, "f32")]
STYLES: list[tuple[str | None, float | None]] = [("half", None), (None, 1e-5), ("interleaved", 1e-6), (None, None)]
NAMES = [f"{h}x{latent}+{rope}-{dtype}" for h, latent, rope, _, dtype in SHAPES]
HEADS = [(3, 20, 18, 5, "f32"), (5, 70, 130, 0, "bf16"), (2, 128, 32, 32, "bf16")]  # heads, N, K, start, dtype


def attention_attrs(index: int) -> dict[str, Any]:
    heads, latent, rope, _, _ = SHAPES[index]
    return {"layer": 0, "heads": heads, "latent": latent, "rope": rope, "scale": 0.11}


def cache_attrs(index: int) -> dict[str, Any]:
    heads, latent, rope, _, _ = SHAPES[index]
    style, eps = STYLES[index]
    return {"layer": 0, "heads": heads, "latent": latent, "rope": rope, "q_start": 3, "style": style, "norm_eps": eps}


@functools.cache
def launches() -> list[Launch]:
    made = []
    for i, (heads, latent, rope, size, dtype) in enumerate(SHAPES):
        types = [f"f32[T,{heads * latent}]", f"f32[T,{heads * rope}]"]
        made.append(launched("latent_attention", attention_attrs(i), types, size, dtype))
    for i, (heads, latent, rope, size, dtype) in enumerate(SHAPES):
        style, eps = STYLES[i]
        types = [f"f32[T,{heads * (rope + 4)}]", f"f32[T,{latent}]", f"f32[T,{rope}]"]
        types += [f"f32[T,{rope // 2}]"] * (2 * (style is not None)) + [f"f32[{latent}]"] * (eps is not None)
        made.append(launched("latent_cache", cache_attrs(i), types, size, dtype))
    for heads, size, depth, start, dtype in HEADS:
        types = [f"f32[T,{heads * (depth + start + 1)}]", f"{dtype}[{heads},{size},{depth}]"]
        made.append(launched("head_linear", {"start": start}, types, 16, "f32"))
    return made


@pytest.fixture(autouse=True, scope="module")
def _compile_first() -> None:
    build(source(launches()))


def call(index: int, step: Step, inputs: Sequence[np.ndarray], isa: str, threads: int, kv: Any = None) -> np.ndarray:
    rank = Rank(build(source(launches()))[isa], launches(), threads, kv)
    out = np.full((len(inputs[0]), int(launches()[index].outputs[0].shape[1])), np.nan, np.float32)
    assert rank.call(index, step, inputs, [out]) == 0
    rank.close()
    return out


def pack(rows: np.ndarray) -> np.ndarray:
    """Rows [blocks, block_size, 1, W] as kernels hold them: 64 bytes of another layer before and 128 behind."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    return aligned(np.pad(flat, ((0, 0), (64, 128)), constant_values=0xA5))


def unpack(packed: np.ndarray, like: np.ndarray) -> np.ndarray:
    assert (packed[:, :64] == 0xA5).all(), "wrote in front of the layer's part of a block"
    assert (packed[:, -128:] == 0xA5).all(), "wrote behind it"
    return np.ascontiguousarray(packed[:, 64:-128]).view(like.dtype).reshape(like.shape)


def make_step(index: int, lengths: Sequence[tuple[int, int]], seed: int) -> tuple[Step, np.ndarray]:
    """A step of sequences (tokens before it, tokens in it) over blocks in any order; unwritten rows hold NaN."""
    rng = np.random.default_rng(seed)
    _, latent, rope, size, dtype = SHAPES[index]
    needed = [-(-(before + new) // size) for before, new in lengths]
    order = rng.permutation(sum(needed) + 2).astype(np.int32)
    tables = np.full((len(lengths), max(needed) + 1), -(2**30), np.int32)
    rows = np.full((len(order), size, 1, latent + rope), np.nan, NUMPY_DTYPES[dtype])
    for s, (before, new) in enumerate(lengths):
        tables[s, : needed[s]], order = order[: needed[s]], order[needed[s] :]
        position = np.arange(before + new)
        fresh = rng.standard_normal((before + new, 1, latent + rope)) * 1.5
        rows[tables[s, position // size], position % size] = fresh.astype(rows.dtype)
    starts = np.cumsum([0] + [new for _, new in lengths]).astype(np.int32)
    return Step(starts, np.array([sum(pair) for pair in lengths], np.int32), tables), rows


def context(index: int, step: Step, rows: np.ndarray) -> StepContext:
    latent = SHAPES[index][1]
    cache = KVCache(rows, rows[..., :latent])
    return StepContext(SHAPES[index][3], step.query_start, step.context_len, step.block_tables, {0: cache})


lengths = st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), min_size=1, max_size=4)


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=NAMES)
@given(lengths=lengths, seed=st.integers(0, 2**32), threads=st.integers(2, 4))
@settings(max_examples=8, deadline=None)
def test_attention(index: int, lengths: list[tuple[int, int]], seed: int, threads: int) -> None:
    """The reference's numbers, and the same bits on every ISA level, for any number of threads, and token by token."""
    heads, latent, rope, _, _ = SHAPES[index]
    step, rows = make_step(index, lengths, seed)
    rng = np.random.default_rng(seed)
    tokens = int(step.query_start[-1])
    inputs = [rng.standard_normal((tokens, heads * width)).astype(np.float32) for width in (latent, rope)]
    operator = OPERATORS["latent_attention"]
    (wanted,) = operator.reference(context(index, step, rows), operator.attrs(**attention_attrs(index)), inputs)
    kv = pack(rows)
    out = call(index, step, inputs, ISAS[0], 1, kv)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    for isa in ISAS:
        np.testing.assert_array_equal(call(index, step, inputs, isa, threads, kv).view(np.uint32), out.view(np.uint32))
    s = seed % len(lengths)
    token = int(step.query_start[s + 1]) - 1  # the sequence's last token alone, as a decode computes it
    alone = Step(np.array([0, 1], np.int32), step.context_len[s : s + 1], step.block_tables[s : s + 1])
    one = call(index, alone, [x[token : token + 1] for x in inputs], ISAS[0], threads, kv)
    np.testing.assert_array_equal(one[0].view(np.uint32), out[token].view(np.uint32))


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=NAMES)
@given(lengths=lengths, seed=st.integers(0, 2**32), threads=st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_cache(index: int, lengths: list[tuple[int, int]], seed: int, threads: int) -> None:
    """Norm, rotation and the rows that are written, from inputs whose rows lie apart; nothing else changes."""
    heads, latent, rope, _, dtype = SHAPES[index]
    style, eps = STYLES[index]
    step, rows = make_step(index, lengths, seed)
    rng = np.random.default_rng(seed)
    tokens = int(step.query_start[-1])
    widths = [heads * (rope + 4), latent, rope] + [rope // 2] * (2 * (style is not None))
    inputs = [rng.standard_normal((tokens, w + 5)).astype(np.float32)[:, 2 : w + 2] for w in widths]
    inputs += [rng.uniform(0.5, 2, latent).astype(np.float32)] * (eps is not None)
    operator = OPERATORS["latent_cache"]
    wanted_rows = rows.copy()
    (wanted,) = operator.reference(context(index, step, wanted_rows), operator.attrs(**cache_attrs(index)), inputs)
    for isa in ISAS:
        kv = pack(rows)
        out = call(len(SHAPES) + index, step, inputs, isa, threads, kv)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
        got = unpack(kv, rows).astype(np.float32)
        near = 1e-5 if dtype == "f32" else 2**-7  # the neighbouring bf16 number
        np.testing.assert_allclose(got, wanted_rows.astype(np.float32), rtol=near, atol=1e-5)


@pytest.mark.parametrize("index", range(len(HEADS)))
@given(tokens=st.integers(1, MOST), seed=st.integers(0, 2**32), threads=st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_head_linear(index: int, tokens: int, seed: int, threads: int) -> None:
    """The reference's numbers; a token's bits depend on neither the others, threads nor ISA level."""
    heads, size, depth, start, dtype = HEADS[index]
    rng = np.random.default_rng(seed)
    width = heads * (depth + start + 1)
    x = rng.standard_normal((tokens, width + 3)).astype(np.float32)[:, :width]
    w = rng.standard_normal((heads, size, depth)).astype(NUMPY_DTYPES[dtype])
    operator = OPERATORS["head_linear"]
    empty = np.zeros((1, 1), np.int32)
    step = Step(np.array([0, tokens], np.int32), np.array([tokens], np.int32), empty)
    (wanted,) = operator.reference(StepContext(16, step.query_start, step.context_len, empty),
                                   operator.attrs(start=start), [x, w])  # fmt: skip
    packed = aligned(apply(parse("panels(load('w'), 64)"), [w]))
    number = 2 * len(SHAPES) + index
    out = call(number, step, [x, packed], ISAS[0], threads)
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5 * depth**0.5)
    for isa in ISAS[1:]:
        np.testing.assert_array_equal(call(number, step, [x, packed], isa, 2).view(np.uint32), out.view(np.uint32))
    one = Step(np.array([0, 1], np.int32), np.array([1], np.int32), empty)
    last = call(number, one, [x[-1:], packed], ISAS[0], threads)
    np.testing.assert_array_equal(last[0].view(np.uint32), out[-1].view(np.uint32))


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=NAMES)
def test_scratch_is_what_the_kernel_takes(index: int) -> None:
    heads, latent, rope, size, dtype = SHAPES[index]
    kind = {"f32": "float", "bf16": "llmc::bf16"}[dtype]
    have = f"llmc::LatentAttention<{heads}, {latent}, {rope}, {size}, {kind}>::scratch_bytes(5000)"
    check = f"static_assert({have} == {scratch_bytes(latent, rope, 5000)});"
    build(f'#include "plugins/latent_attention/cpu.h"\n{check}', ISAS[:1])


@pytest.mark.parametrize(
    ("name", "attrs", "types", "reason"),
    [
        ("head_linear", {"start": 2}, ["f32[T,8]", "f32[2,5,3]"], "no columns 2:5"),
        ("head_linear", {}, ["f32[T,8]", "f8e4m3[2,5,3]"], "expected f32 or bf16"),
        ("latent_cache", {**cache_attrs(0), "style": "spiral"}, ["f32[T,30]"], "style"),
        ("latent_cache", {**cache_attrs(0), "q_start": 5}, ["f32[T,30]", "f32[T,20]", "f32[T,6]"], "no columns 5:11"),
        ("latent_attention", attention_attrs(0), ["f32[T,60]", "f32[T,12]"], "expected"),
    ],
)
def test_types_that_do_not_fit_are_refused(name: str, attrs: dict[str, Any], types: list[str], reason: str) -> None:
    operator = OPERATORS[name]
    with pytest.raises(ValueError, match=reason):
        operator.infer(operator.attrs(**attrs), list(map(TensorType.parse, types)))


def test_a_row_is_stored_once() -> None:
    """DeepSeek-V3: 512 + 64 columns in bf16 are 1152 bytes a token and layer, for 128 heads."""
    assert layer_bytes(512, 64, 16, "bf16") == 16 * (512 + 64) * 2
    with pytest.raises(ValueError, match="block_size=24"):
        layer_bytes(512, 64, 24, "bf16")
