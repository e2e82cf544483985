"""paged_attention of the cuda targets against its reference, interpreted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.operator import KVCache
from llmc.plugins.paged_attention import OPERATOR, Attrs
from tests.unit.cuda.harness import Step, check, environment
from tests.unit.cuda.steps import cached, paged_step


@dataclasses.dataclass(frozen=True)
class Case:
    attrs: Attrs
    block_size: int = 16
    kv_dtype: str = "bf16"

    @property
    def types(self) -> list[TensorType]:
        a = self.attrs
        return [TensorType("f32", ("T", a.heads, a.head_dim)), *a.scoring.head_inputs(a.heads)]


CASES = {
    "grouped": Case(Attrs(0, 9, 3, 64, 0.125)),
    "one head each, short window": Case(Attrs(0, 2, 2, 24, 0.2, window=5), 32),
    "softcap": Case(Attrs(0, 4, 2, 80, 0.11, softcap=3.0), 64),
    "long window": Case(Attrs(0, 8, 1, 32, 0.2, window=300, softcap=50.0)),
    "sinks": Case(Attrs(0, 6, 3, 32, 0.2, sinks=True)),
    "slopes": Case(Attrs(0, 3, 3, 40, 0.2, slopes=True)),
    "chunks": Case(Attrs(0, 4, 2, 24, 0.2, v_dim=40, chunk=100)),
    "everything": Case(Attrs(0, 20, 1, 48, 0.1, v_dim=20, window=70, softcap=4.0, slopes=True, sinks=True)),
    "fp8": Case(Attrs(0, 9, 3, 64, 0.125, kv_scales=((0.25, 0.013, 3.0), (1.0, 0.5, 0.07))), 16, "f8e4m3"),
    "fp8, one scale": Case(Attrs(0, 4, 2, 18, 0.2, v_dim=37, kv_scales=((0.1, 0.1), (2.0, 2.0))), 32, "f8e4m3"),
}


def make(case: Case, lengths: Sequence[tuple[int, int]], padded: int, seed: int) -> tuple[Step, list[np.ndarray]]:
    """A step and its inputs; what is not written in the cache holds NaN."""
    rng = np.random.default_rng(seed)
    a, size = case.attrs, case.block_size
    step, blocks = paged_step(lengths, size, rng, padded)
    widths, dtype = (a.head_dim, a.value_dim), NUMPY_DTYPES[case.kv_dtype]
    cache = KVCache(*(np.full((blocks, size, a.kv_heads, width), np.nan, dtype) for width in widths))
    step.context.kv[a.layer] = cache
    for s, (before, new) in enumerate(lengths):
        place = cached(step, s)
        for kind, store in enumerate((cache.keys, cache.values)):
            fresh = rng.standard_normal((before + new, *store.shape[2:]))
            if a.kv_scales is not None:
                fresh = np.clip(fresh / np.array(a.kv_scales[kind])[:, None], -448, 448)
            store[place] = fresh.astype(store.dtype)
    inputs = [rng.standard_normal((step.context.query_start[-1], a.heads, a.head_dim)).astype(np.float32)]
    inputs += [rng.uniform(0.05, 1, t.shape).astype(np.float32) for t in case.types[1:]]
    return step, inputs


def run(name: str, lengths: Sequence[tuple[int, int]], decode: bool, padded: int = 0, seed: int = 0) -> np.ndarray:
    case = CASES[name]
    step, inputs = make(case, lengths, padded, seed)
    env = environment(step, decode, stored={("in", 0): "bf16"})
    return check(OPERATOR, case.attrs, case.types, inputs, step, env, rtol=0.01, atol=0.01)[0]


@pytest.mark.parametrize("name", CASES)
@given(
    before=st.lists(st.integers(0, 600), min_size=1, max_size=3), padded=st.integers(0, 2), seed=st.integers(0, 2**32)
)
@settings(max_examples=2, deadline=None)
def test_decode(name: str, before: list[int], padded: int, seed: int) -> None:
    run(name, [(count, 1) for count in before], True, padded, seed)


@pytest.mark.parametrize("name", CASES)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=2, max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=2, deadline=None)
def test_mixed(name: str, lengths: list[tuple[int, int]], seed: int) -> None:
    run(name, lengths, False, 0, seed)
