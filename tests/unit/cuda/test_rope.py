"""rope_cache of the cuda targets against its reference, interpreted: what it returns and what it writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.plugins.operator import KVCache
from llmc.plugins.rope_cache import OPERATOR, Attrs
from tests.unit.cuda.harness import check, environment
from tests.unit.cuda.steps import paged_step

CASES = {
    "rotated": Attrs(0, 9, 3, 64, rotary=64),
    "partly, normed": Attrs(0, 4, 2, 80, rotary=32, qk_norm_eps=1e-6),
    "interleaved": Attrs(0, 2, 2, 24, rotary=8, style="interleaved"),
    "plain": Attrs(0, 4, 1, 20),
    "interleaved, normed": Attrs(0, 2, 1, 128, rotary=128, style="interleaved", qk_norm_eps=1e-5),
    "normed last": Attrs(0, 4, 2, 24, rotary=24, qk_norm_eps=1e-5, norm_last=True, v_dim=40),
    "each head": Attrs(0, 4, 2, 20, rotary=8, qk_norm_eps=1e-5, norm="layer", norm_scope="each", norm_bias=True),
    "all heads": Attrs(0, 6, 2, 24, rotary=24, qk_norm_eps=1e-6, norm_scope="all"),
    "all ranks' heads": Attrs(0, 3, 1, 32, rotary=32, qk_norm_eps=1e-6, norm_scope="all", norm_means=True),
    "layer norm last": Attrs(0, 4, 4, 16, qk_norm_eps=1e-5, norm="layer", norm_last=True, norm_bias=True),
    "fp8": Attrs(0, 4, 2, 24, rotary=24, kv_scales=((0.01, 0.3), (2.0, 0.004))),
    "fp8, one scale": Attrs(0, 3, 3, 20, v_dim=36, kv_scales=((0.5,) * 3, (0.3,) * 3)),
}


def types_of(a: Attrs) -> list[TensorType]:
    widths = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim]
    shapes: list[tuple[Dim, ...]] = [("T", w) for w in widths + [a.rotary] * (2 * bool(a.rotary))]
    if a.has_norm:
        shapes += [(w if a.norm_scope != "head" else a.head_dim,) for w in widths[:2]] * (1 + a.norm_bias)
    shapes += [("T", 2)] * a.norm_means
    return [TensorType("f32", shape) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 3)), min_size=1, max_size=2),
    padded=st.integers(0, 2),
    q=st.sampled_from(["f32", "bf16"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=2, deadline=None)
def test_matches_reference(name: str, lengths: list[tuple[int, int]], padded: int, q: str, seed: int) -> None:
    a, rng = CASES[name], np.random.default_rng(seed)
    dtype = NUMPY_DTYPES["f8e4m3" if a.kv_scales else "bf16"]
    step, blocks = paged_step(lengths, [16, 32, 64][seed % 3], rng, padded)
    shape = (blocks, step.context.block_size, a.kv_heads)
    step.context.kv[a.layer] = KVCache(*(np.full((*shape, w), np.nan, dtype) for w in (a.head_dim, a.value_dim)))
    types = types_of(a)
    tokens = int(step.context.query_start[-1])
    inputs = [
        rng.standard_normal([tokens if d == "T" else d for d in t.shape]).astype(np.float32)
        if i < 3
        else rng.uniform(0.5, 2, [tokens if d == "T" else d for d in t.shape]).astype(np.float32)
        for i, t in enumerate(types)
    ]
    env = environment(step, decode=padded > 0, stored={("in", 0): q, ("out", 0): q})
    check(OPERATOR, a, types, inputs, step, env, rtol=1e-5, atol=1e-5)
