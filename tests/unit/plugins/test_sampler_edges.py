"""Where the native sampler looks at a part of a row only: rows that such a part misleads, and what lies on an edge."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.plugins.sampler import reference
from llmc.runtime.native_sampler import SamplingRow
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.native_step import build
from tests.unit.plugins.test_sampler import check, library

#: From 1024 on a row is looked at in parts; no multiple of 16 but one; the last has chunks of more than 16 vectors.
SIZES = (1023, 1024, 1025, 3001, 20_011, 140_003)
KINDS = ("normal", "equal", "rounded", "flat", "one", "few", "ascending", "descending", "two levels", "far from zero")


def logits_of(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(size) * 3
    if kind == "equal":
        x = np.full(size, rng.standard_normal())
    elif kind == "rounded":
        x = np.round(x)
    elif kind == "flat":
        x *= 1e-5
    elif kind == "one":
        x[rng.integers(size)] = 60
    elif kind == "few":
        x[rng.random(size) < 0.999] = -np.inf
        x[rng.integers(size)] = 0
    elif kind in ("ascending", "descending"):
        x = np.sort(x)[:: 1 if kind == "ascending" else -1]
    elif kind == "two levels":
        x = np.where(rng.random(size) < 0.01, 5.0, 0.0)
    elif kind == "far from zero":
        x -= 1e5
    return np.ascontiguousarray(x, np.float32)


@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**32),
    row=st.builds(
        SamplingRow,
        temperature=st.sampled_from([1e-5, 0.05, 0.8, 1.0, 3.0, 1000.0]),
        top_p=st.sampled_from([1.0, 1.0, 0.9999, 0.9, 0.5, 0.01, 1e-7, 0.0]),
        top_k=st.sampled_from([0, 0, 0, 1, 5, 50, 700, 1022]),
        min_p=st.sampled_from([0.0, 0.0, 1e-12, 0.01, 0.3, 1.0]),
        seed=st.integers(0, 2**64 - 1),
    ),
)
@settings(max_examples=400, deadline=None)
def test_rows_of_all_kinds(kind: str, size: int, seed: int, row: SamplingRow) -> None:
    check(logits_of(kind, size, np.random.default_rng(seed)), row)


def drawn(logits: np.ndarray, row: SamplingRow, count: int) -> set[int]:
    """Tokens of so many draws, the same on all levels."""
    rows = [dataclasses.replace(row, seed=5, counter=i) for i in range(count)]
    some = np.tile(logits, (count, 1))
    found = [[s.token for s in library(isa).sampler(logits.size, count, 0).sample(some, rows)] for isa in ISAS]
    assert all(tokens == found[0] for tokens in found)
    return set(found[0])


@pytest.mark.parametrize(
    "row", [SamplingRow(top_k=20), SamplingRow(top_p=0.5), SamplingRow(top_k=21, top_p=0.96)], ids=["k", "p", "both"]
)
def test_of_equals_at_the_end_the_lowest_ids_stay(row: SamplingRow) -> None:
    """Ten tokens are better, twenty are equal; what of these stays stands in chunks before those that do not."""
    logits = np.full(5000, -np.inf, np.float32)
    better, equals = np.arange(4990, 5000), np.arange(7, 5000, 249)[:20]
    logits[equals], logits[better] = 0, np.log(1.1)
    weights = np.rint(reference.exp(logits - logits.max()) * np.float32(2**30)).astype(np.int64)
    kept = np.flatnonzero(reference.kept(weights, row))
    assert 10 < len(kept) < 30
    assert set(kept) == {*better, *equals[: len(kept) - 10]}
    assert drawn(logits, row, 1000) == set(kept.tolist())


@pytest.mark.parametrize("top_p", [0.99, 0.9, 0.3])
@pytest.mark.parametrize("low", [-40.0, -5.0, 0.5])
def test_a_guess_that_is_wrong_is_noticed(low: float, top_p: float) -> None:
    """Where the sampler looks to guess how much lies below, there is something else than everywhere else."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 16, 16)).astype(np.float32)
    logits[np.arange(64), np.arange(64) % 16] = low
    logits[:, 3, :] += 3  # each lane's largest, looked at as well
    for seed in range(20):
        check(logits.reshape(-1), SamplingRow(0.7, top_p=top_p, seed=seed))
        check(logits.reshape(-1)[:-5], SamplingRow(2.0, top_p=top_p, seed=seed))


def test_a_penalised_row_is_cut_where_its_copy_lies() -> None:
    """The changed row is where weights are written when most of it stays."""
    rng = np.random.default_rng(1)
    for spread in (1e-3, 3.0):
        logits = (rng.standard_normal(5003) * spread).astype(np.float32)
        ids = rng.integers(0, 5003, 40, dtype=np.int32)
        row = SamplingRow(presence_penalty=0.7, output=ids, bias_ids=ids[:2], bias=np.array([3, -3], np.float32))
        for top_p in (1.0, 0.9, 0.2):
            for seed in range(10):
                check(logits, dataclasses.replace(row, top_p=top_p, seed=seed, num_logprobs=3))


_WEIGHTS = """
#include "plugins/sampler/weights.h"
extern "C" void weights(const float* x, int n, float temperature, int32_t* to) {
  llmc::sampler::Scale(llmc::sampler::Survey(x, n), temperature).weights(x, n, to);
}
"""


@pytest.mark.parametrize("temperature", [1.0, 0.7, 13.0])
def test_weights_have_the_bits_of_exp(temperature: float) -> None:
    rng = np.random.default_rng(2)
    x = -np.abs(rng.standard_normal(100_003)).astype(np.float32) * np.float32(12 * temperature)
    x[:6] = [0, -0.0, -np.inf, -1e-30, -1e38, -87.4 * temperature]
    x[6:200] = -np.float32(np.log(2)) * np.arange(194, dtype=np.float32) / 4 * np.float32(temperature)
    scaled = x * (np.float32(1) / np.float32(temperature))
    want = np.rint(reference.exp(scaled) * np.float32(2**30)).astype(np.int32)
    for isa, dll in build(_WEIGHTS).items():
        found = np.zeros(x.size, np.int32)
        dll.weights.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_void_p]
        dll.weights(x.ctypes.data, x.size, temperature, found.ctypes.data)
        np.testing.assert_array_equal(found, want, isa)
