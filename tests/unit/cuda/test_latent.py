"""The operators of latent attention on the cuda targets against their references, interpreted."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import TensorType
from llmc.plugins import latent_attention, latent_cache
from llmc.plugins.operator import KVCache
from tests.unit.cuda.harness import Step, check, environment, launches
from tests.unit.cuda.steps import cached, paged_step

#: heads, latent, rope, block size, style, eps: one tile of many tokens, one token in several tiles, odd widths.
SHAPES: list[tuple[int, int, int, int, str | None, float | None]] = [
    (3, 20, 6, 16, "half", None),
    (16, 64, 16, 32, None, 1e-5),
    (40, 33, 8, 16, "interleaved", 1e-6),
    (1, 48, 2, 64, None, None),
]
BF16 = {("in", 0): "bf16", ("in", 1): "bf16"}


def with_cache(
    lengths: list[tuple[int, int]], size: int, width: int, rng: np.random.Generator, padded: int
) -> tuple[Step, KVCache]:
    """A step whose cache holds nothing yet."""
    step, blocks = paged_step(lengths, size, rng, padded)
    rows = np.full((blocks, size, 1, width), np.nan, ml_dtypes.bfloat16)
    step.context.kv[0] = KVCache(rows, np.empty((blocks, size, 0, 0), rows.dtype))
    return step, step.context.kv[0]


def attend(shape: int, lengths: list[tuple[int, int]], decode: bool, padded: int, seed: int) -> None:
    heads, latent, rope, size, _, _ = SHAPES[shape]
    rng = np.random.default_rng(seed)
    step, cache = with_cache(lengths, size, latent + rope, rng, padded)
    for s, (before, new) in enumerate(lengths):
        cache.keys[cached(step, s)] = rng.standard_normal((before + new, 1, latent + rope))
    tokens = int(step.context.query_start[-1])
    types = [TensorType("f32", ("T", heads * width)) for width in (latent, rope)]
    inputs = [rng.standard_normal((tokens, heads * width)).astype(np.float32) for width in (latent, rope)]
    attrs = latent_attention.Attrs(0, heads, latent, rope, 0.11)
    env = environment(step, decode, stored=BF16)
    check(latent_attention.OPERATOR, attrs, types, inputs, step, env, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@given(
    before=st.lists(st.integers(0, 600), min_size=1, max_size=3), padded=st.integers(0, 2), seed=st.integers(0, 2**32)
)
@settings(max_examples=2, deadline=None)
def test_decode(shape: int, before: list[int], padded: int, seed: int) -> None:
    attend(shape, [(count, 1) for count in before], True, padded, seed)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), min_size=2, max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=2, deadline=None)
def test_mixed(shape: int, lengths: list[tuple[int, int]], seed: int) -> None:
    attend(shape, lengths, False, 0, seed)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 4)), min_size=1, max_size=2),
    padded=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=3, deadline=None)
def test_cache(shape: int, lengths: list[tuple[int, int]], padded: int, seed: int) -> None:
    heads, latent, rope, size, style, eps = SHAPES[shape]
    rng = np.random.default_rng(seed)
    step, _ = with_cache(lengths, size, latent + rope, rng, padded)
    tokens = int(step.context.query_start[-1])
    types = [TensorType("f32", ("T", n)) for n in (heads * (rope + 4), latent, rope)]
    types += [TensorType("f32", ("T", rope // 2))] * (2 * (style is not None))
    types += [TensorType("f32", (latent,))] * (eps is not None)
    inputs = [rng.standard_normal([tokens if d == "T" else d for d in t.shape]).astype(np.float32) for t in types]
    attrs = latent_cache.Attrs(0, heads, latent, rope, 3, style, eps)
    env = environment(step, padded > 0, stored={("in", 0): "bf16", ("out", 0): "bf16"})
    check(latent_cache.OPERATOR, attrs, types, inputs, step, env)


def test_a_cache_in_fp8_is_refused() -> None:
    step, _ = with_cache([(0, 1)], 16, 24, np.random.default_rng(0), 0)
    types = [TensorType("f32", ("T", 60)), TensorType("f32", ("T", 12))]
    attrs = latent_attention.Attrs(0, 3, 20, 4, 0.1)
    with pytest.raises(ValueError, match="bf16, not fp8"):
        launches(latent_attention.OPERATOR, attrs, types, environment(step, kv_dtype="f8e4m3"))
