"""The native sampler, called as the runtime calls it: the very tokens of the reference, and the right distribution."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.plugins.sampler import reference
from llmc.runtime import native
from llmc.runtime.native_sampler import Sampled, SampledStruct, SamplingRow, SamplingStruct
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.native_step import build

SOURCE = """
#include "plugins/sampler/cpu.h"
extern "C" int32_t llmc_abi_version() { return LLMC_ABI_VERSION; }
extern "C" void* llmc_create(const llmc_rank* rank, char* err, int32_t n) {
  if (rank->num_blocks != 7) { std::strncpy(err, "out of blocks", n); return nullptr; }
  return new int32_t(rank->threads);
}
extern "C" int32_t llmc_run(void* handle, const llmc_step* step) {
  step->logits[0] = float(step->ids[step->num_tokens - 1] * 100 + *(int32_t*)handle);
  return step->num_rows;
}
extern "C" void llmc_destroy(void* handle) { delete (int32_t*)handle; }
extern "C" void llmc_abort(uint8_t* comm) { comm[0] = 1; }
"""
INT32 = np.int32


@functools.cache
def code(isa: str, text: str = SOURCE) -> bytes:
    return Path(build(text)[isa]._name).read_bytes()


@functools.cache
def library(isa: str) -> native.Library:
    return native.Library(code(isa))


def sample(logits: np.ndarray, row: SamplingRow, isa: str = ISAS[0]) -> Sampled:
    return library(isa).sampler(logits.size, 1, 20).sample(logits.reshape(1, -1), [row])[0]


def check(logits: np.ndarray, row: SamplingRow) -> Sampled:
    """Samples on all ISA levels and compares with the reference."""
    want = reference.sample(logits, row)
    results = [sample(logits, row, isa) for isa in ISAS]
    for got in results:
        assert (got.token, got.rank) == (want.token, want.rank)
        if want.token >= 0:
            assert [token for token, _ in got.top] == [token for token, _ in want.top]
            np.testing.assert_allclose(
                [got.logprob, *(x for _, x in got.top)], [want.logprob, *(x for _, x in want.top)], rtol=1e-5, atol=2e-6
            )
    return results[0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, SamplingRow]:
    size = draw(st.sampled_from([1, 2, 15, 16, 17, 100, 1000, 9001]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (rng.standard_normal(size) * draw(st.sampled_from([0, 0.5, 3, 12]))).astype(np.float32)
    logits = np.round(logits) if draw(st.booleans()) else logits  # many equals
    row = SamplingRow(
        temperature=draw(st.sampled_from([0, 1e-6, 0.3, 1, 2, 40])),
        top_p=draw(st.sampled_from([1, 0.95, 0.5, 0.01, 0])),
        top_k=draw(st.sampled_from([0, 1, 5, 40, 500])),
        min_p=draw(st.sampled_from([0, 0.05, 0.7, 1])),
        seed=draw(st.integers(0, 2**64 - 1)),
        counter=draw(st.integers(0, 2**40)),
        num_logprobs=draw(st.sampled_from([-1, 0, 1, 20])),
    )
    if not draw(st.booleans()):
        return logits, row
    ids = functools.partial(rng.integers, 0, size, dtype=INT32)
    return logits, dataclasses.replace(
        row,
        repetition_penalty=draw(st.sampled_from([1, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0, 0.8])),
        frequency_penalty=draw(st.sampled_from([0, 0.3, -0.2])),
        prompt=array("i", ids(12).tolist()),
        output=ids(size=draw(st.sampled_from([0, 9]))),
        bias_ids=ids(3),
        bias=np.array([4, -2, -100], np.float32),
        banned=ids(2),
    )


@given(case=cases())
@settings(max_examples=300, deadline=None)
def test_tokens_are_the_references(case: tuple[np.ndarray, SamplingRow]) -> None:
    check(*case)


def test_a_vocabulary_of_real_size() -> None:
    rng = np.random.default_rng(1)
    for size in (49152, 151_937, 262_144):
        logits = (rng.standard_normal(size) * 3).astype(np.float32)
        for row in (
            SamplingRow(0),
            SamplingRow(),
            SamplingRow(top_p=0.9),
            SamplingRow(top_k=50),
            SamplingRow(min_p=0.1),
        ):
            check(logits, dataclasses.replace(row, seed=size, num_logprobs=5))


@pytest.mark.parametrize(
    "row",
    [
        SamplingRow(temperature=0.7),
        SamplingRow(top_k=5),
        SamplingRow(top_p=0.6),
        SamplingRow(min_p=0.2),
        SamplingRow(temperature=1.5, top_k=12, top_p=0.9),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(row: SamplingRow) -> None:
    """Chi-square of 20000 draws against float64 probabilities; the seed is fixed, the bound is 5 sigma."""
    logits, draws = np.linspace(-2, 2, 20).astype(np.float32), 20_000
    p = np.exp(logits.astype(float) / row.temperature)
    order = np.argsort(-p)
    keep = order[: row.top_k or 20]
    running = np.cumsum(p[keep]) / p[keep].sum()
    keep = keep[: int(np.searchsorted(running, row.top_p)) + 1]
    keep = keep[p[keep] >= row.min_p * p.max()]
    expected = np.zeros(20)
    expected[keep] = p[keep] / p[keep].sum() * draws
    rows = [dataclasses.replace(row, seed=11, counter=i) for i in range(draws)]
    found = library(ISAS[0]).sampler(20, draws, 0).sample(np.tile(logits, (draws, 1)), rows)
    counts = np.bincount([s.token for s in found], minlength=20)
    assert counts[expected == 0].sum() == 0
    freedom = len(keep) - 1
    chi_square = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_philox_known_answers() -> None:
    """From the Random123 distribution (kat_vectors, philox4x32-10)."""
    assert reference.philox(0, 0) == 0xE169C58D_6627E8D5
    logits = np.zeros(2**16, np.float32)  # equal weights: the token is the top 16 bits of the number
    assert sample(logits, SamplingRow()).token == 0xE169


def test_seed_and_counter_decide() -> None:
    logits = np.zeros(50_000, np.float32)
    rows = [SamplingRow(seed=s, counter=c) for s in (0, 1, 2**63) for c in (0, 1, 2**33)]
    tokens = [sample(logits, row).token for row in rows]
    assert len(set(tokens)) == len(tokens)
    assert tokens == [sample(logits, row).token for row in rows]


def test_order_of_changes() -> None:
    """Penalties before bias, bans last: worked by hand."""
    logits = np.array([2.0, -1.0, 0.5, 3.0], np.float32)
    row = SamplingRow(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        prompt=np.array([0, 1], INT32),
        output=np.array([0, 0, 99, -5], INT32),
        bias_ids=np.array([2, 0], INT32),
        bias=np.array([1.0, 10.0], np.float32),
        banned=np.array([3], INT32),
    )
    changed = reference.change_logits(logits, row)
    np.testing.assert_array_equal(changed, [2 / 2 - 2 * 0.5 - 0.25 + 10, -2, 1.5, -np.inf])
    assert check(logits, dataclasses.replace(row, temperature=0)).token == 0
    assert check(logits, dataclasses.replace(row, temperature=0, num_logprobs=1)).top[0][0] == 3  # of the raw row


@pytest.mark.parametrize("at", [0, 16, 36])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_an_answer(bad: float, at: int) -> None:
    logits = np.zeros(37, np.float32)
    logits[at] = bad
    for row in (SamplingRow(0), SamplingRow(), SamplingRow(0, num_logprobs=2)):
        assert sample(logits, row, ISAS[-1]).token == -1
    banned = SamplingRow(banned=np.arange(37, dtype=INT32))
    assert check(np.zeros(37, np.float32), banned).token == -1
    assert check(np.full(37, -np.inf, np.float32), SamplingRow()).token == -1
    lone = np.full(37, -np.inf, np.float32)
    lone[at] = 1
    assert check(lone, SamplingRow(num_logprobs=2)).token == at


def test_greedy_takes_the_lowest_of_equals_and_rows_do_not_mix() -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[0, [90, 40]], logits[1, 7], logits[2, [3, 99]] = 5, 1, 2
    found = library(ISAS[-1]).sampler(100, 8, 2).sample(logits, [SamplingRow(0, num_logprobs=2)] * 3)
    assert [(s.token, s.rank, [t for t, _ in s.top]) for s in found] == [
        (40, 1, [40, 90]),
        (7, 1, [7, 0]),
        (3, 1, [3, 99]),
    ]


def test_rows_are_the_same_on_several_threads() -> None:
    rng = np.random.default_rng(3)
    logits = (4 * rng.standard_normal((11, 50_000))).astype(np.float32)
    rows = [SamplingRow(0.9, top_p=0.9, seed=i, num_logprobs=i % 3) for i in range(len(logits))]
    alone = library(ISAS[-1]).sampler(50_000, 16, 2).sample(logits, rows)
    for threads in (2, 3, 16):
        sampler = library(ISAS[-1]).sampler(50_000, 16, 2, threads)
        assert sampler.sample(logits, rows) == alone
        assert sampler.sample(logits[:1], rows[:1]) == alone[:1]


def test_a_row_that_is_kept_may_change_where_it_says_so() -> None:
    logits = np.random.default_rng(4).standard_normal((2, 300)).astype(np.float32)
    rows = [SamplingRow(2.0, presence_penalty=50.0), SamplingRow(0)]
    sampler = library(ISAS[0]).sampler(300, 2, 3)
    best, none, seen = int(logits[1].argmax()), np.empty(0, INT32), array("i")
    for step in range(30):
        rows[0].counter, rows[0].output = step, array("i", seen) if step % 3 else none
        rows[1].banned = np.array([best], INT32) if step % 2 else none
        found = sampler.sample(logits, rows)
        assert [s.token for s in found] == [reference.sample(x, row).token for x, row in zip(logits, rows, strict=True)]
        assert (found[1].token == best) == (step % 2 == 0)
        seen.append(found[0].token)
    assert len(set(seen)) > 10
    rows.reverse()
    assert sampler.sample(logits, rows)[0].token == reference.sample(logits[0], rows[0]).token


def test_structs_are_those_of_the_header() -> None:
    pairs = {"llmc_rank": native.RankStruct, "llmc_step": native.StepStruct, "llmc_sampling": SamplingStruct,
             "llmc_sampled": SampledStruct}  # fmt: skip
    lines = [
        '#include "plugins/cpu/abi.h"',
        "#include <cstddef>",
        f"static_assert(LLMC_ABI_VERSION == {native.ABI_VERSION});",
    ]
    for name, struct in pairs.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, *_ in struct._fields_:
            lines.append(f"static_assert(offsetof({name}, {field}) == {getattr(struct, field).offset});")
    build("\n".join(lines), ISAS[:1])


def test_library_runs_an_engine_and_reports_failures() -> None:
    bytes_ = np.zeros(64, np.uint8)
    memory = native.RankMemory(0, 1, 3, bytes_, bytes_, bytes_, bytes_, num_blocks=7)
    ids, none = np.array([4, 5], INT32), np.empty(0, INT32)
    step = native.StepArrays(ids, ids, ids, ids[:1], ids.reshape(1, 2), none, none, np.zeros((1, 1), np.float32))
    engine = library(ISAS[0]).create(memory)
    engine.run(step)
    assert step.logits[0, 0] == 503
    with pytest.raises(native.StepRefused, match="2 tokens, 1 sequences and 1 rows"):
        engine.run(dataclasses.replace(step, rows=ids[:1]))
    with pytest.raises(native.RankFailure, match="rank 0 of 1"):
        engine.run(dataclasses.replace(step, rows=ids))
    with pytest.raises(TypeError, match="ids: int64"):
        engine.run(dataclasses.replace(step, ids=ids.astype(np.int64)))
    engine.close()
    engine.close()
    with pytest.raises(EnvironmentFault, match="out of blocks"):
        library(ISAS[0]).create(dataclasses.replace(memory, num_blocks=8))
    with pytest.raises(ValueError, match="comm"):
        library(ISAS[0]).create(dataclasses.replace(memory, tp=2))
    library(ISAS[0]).abort(bytes_)
    assert bytes_[0] == 1


def test_library_refuses_other_code() -> None:
    newer = SOURCE.replace("return LLMC_ABI_VERSION", "return LLMC_ABI_VERSION + 1")
    with pytest.raises(PlanError, match=rf"rank0\.so: compiled for ABI {native.ABI_VERSION + 1}.*rebuild the plan"):
        native.Library(code(ISAS[0], newer), "rank0.so")
    with pytest.raises(PlanError, match="no llmc_abi_version"):
        native.Library(code(ISAS[0], "int nothing;"), "rank0.so")
    with pytest.raises(EnvironmentFault, match="cannot load"):
        native.Library(b"not a library")
    assert native.Library(code(ISAS[0]), "rank0.so").sampler(2, 1, 0)


def test_sampler_refuses_what_does_not_fit() -> None:
    sampler = library(ISAS[0]).sampler(4, 1, 2)
    with pytest.raises(ValueError, match="room for 1x4"):
        sampler.sample(np.zeros((2, 4), np.float32), [SamplingRow()] * 2)
    with pytest.raises(ValueError, match="num_logprobs=3"):
        sampler.sample(np.zeros((1, 4), np.float32), [SamplingRow(num_logprobs=3)])
    with pytest.raises(ValueError, match="1 bias ids for 0"):
        sampler.sample(np.zeros((1, 4), np.float32), [SamplingRow(bias_ids=np.zeros(1, INT32))])
    assert sampler.sample(np.zeros((0, 4), np.float32), []) == []
