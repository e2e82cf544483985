"""paged_attention's kernel against its reference, and the independence of every result from everything around it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.blocks import KV_TYPES
from llmc.plugins.cpu.call import KernelEnv
from llmc.plugins.operator import KVCache, StepContext
from llmc.plugins.paged_attention import Attrs, infer, reference
from llmc.plugins.paged_attention import cpu as paged_cpu
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.native_step import Launch, Rank, Step, build, pack, source

MAX_CONTEXT = 1500
#: Instead of a block's number: no memory is there.
NOWHERE = -(2**30)


@dataclasses.dataclass(frozen=True)
class Case:
    attrs: Attrs
    block_size: int
    kv_dtype: str

    def launch(self, tiles: bool = False) -> Launch:
        a = self.attrs
        size = paged_cpu.layer_bytes(a.kv_heads, a.head_dim, a.value_dim, self.block_size, self.kv_dtype)
        env = KernelEnv(
            (1, 2048), (1, 64), block_size=self.block_size, kv_dtype=self.kv_dtype, kv_block_bytes=size,
            kv_offsets={a.layer: 0}, max_context=MAX_CONTEXT, tiles=tiles,
        )  # fmt: skip
        inputs = (TensorType("f32", ("T", a.heads, a.head_dim)), *a.scoring.head_inputs(a.heads))
        outputs = infer(a, inputs)
        return Launch(paged_cpu.launch(a, inputs, outputs, env), inputs, outputs)

    def by_head(self) -> list[np.ndarray]:
        """Slopes and sinks, where the case has them."""
        rng = np.random.default_rng(self.attrs.heads)
        return [
            rng.uniform(0.05, 1, t.shape).astype(np.float32) for t in self.attrs.scoring.head_inputs(self.attrs.heads)
        ]


CASES = [
    Case(Attrs(0, 9, 3, 64, 0.125), 16, "f32"),
    Case(Attrs(0, 4, 4, 24, 0.2, window=5), 16, "bf16"),
    Case(Attrs(0, 4, 2, 80, 0.11, softcap=3.0), 32, "f32"),
    Case(Attrs(0, 8, 1, 96, 0.1, window=300, softcap=50.0), 16, "bf16"),
    Case(Attrs(0, 5, 5, 128, 0.09), 256, "bf16"),
    Case(Attrs(0, 2, 1, 20, 0.3, window=256), 64, "f32"),
    Case(Attrs(0, 6, 3, 32, 0.2, sinks=True), 16, "f32"),
    Case(Attrs(0, 4, 4, 40, 0.2, slopes=True), 16, "bf16"),
    Case(Attrs(0, 4, 2, 24, 0.2, v_dim=40, chunk=100), 32, "f32"),
    Case(Attrs(0, 4, 1, 48, 0.1, v_dim=20, window=70, softcap=4.0, slopes=True, sinks=True), 16, "f32"),
    Case(Attrs(0, 9, 3, 64, 0.125, kv_scales=((0.25, 0.013, 3.0), (1.0, 0.5, 0.07))), 16, "f8e4m3"),
    Case(Attrs(0, 4, 2, 18, 0.2, v_dim=37, window=70, kv_scales=((0.1, 0.3), (0.2, 2.0))), 32, "f8e4m3"),
    Case(Attrs(0, 8, 1, 96, 0.1, softcap=3.0, sinks=True, kv_scales=((0.5,), (0.004,))), 64, "f8e4m3"),
]
NAMES = [f"{c.attrs.heads}over{c.attrs.kv_heads}x{c.attrs.head_dim}-{c.kv_dtype}" for c in CASES]
PLAIN = "Scoring<0, 0, false, false, false>"


@functools.cache
def compiled() -> dict[str, ctypes.CDLL]:
    return build(source([case.launch() for case in CASES]))


@pytest.fixture(autouse=True, scope="module")
def _compile_first() -> None:
    compiled()


def run(index: int, step: Step, cache: KVCache, q: np.ndarray, isa: str, threads: int) -> np.ndarray:
    rank = Rank(compiled()[isa], [case.launch() for case in CASES], threads, pack(cache, CASES[index].kv_dtype))
    out = np.full((len(q), q.shape[1] * CASES[index].attrs.value_dim), np.nan, np.float32)
    assert rank.call(index, step, [q, *CASES[index].by_head()], [out]) == 0
    rank.close()
    return out


def make(case: Case, lengths: Sequence[tuple[int, int]], seed: int) -> tuple[Step, KVCache, np.ndarray]:
    """A step of sequences (tokens before it, tokens in it); blocks in any order; whatever is not written holds NaN."""
    rng = np.random.default_rng(seed)
    a, size = case.attrs, case.block_size
    needed = [-(-(before + new) // size) for before, new in lengths]
    order = rng.permutation(sum(needed) + 3).astype(np.int32)
    tables = np.full((len(lengths), max(needed) + 1), NOWHERE, np.int32)
    shape = (len(order), size, a.kv_heads)
    widths = (a.head_dim, a.value_dim)
    cache = KVCache(*(np.full((*shape, width), np.nan, NUMPY_DTYPES[case.kv_dtype]) for width in widths))
    for s, (before, new) in enumerate(lengths):
        tables[s, : needed[s]], order = order[: needed[s]], order[needed[s] :]
        position = np.arange(before + new)
        for store in (cache.keys, cache.values):
            fresh = rng.standard_normal((before + new, *store.shape[2:])) * 1.5
            if case.kv_dtype == "f8e4m3":  # over all its range, the numbers below the smallest normal one among them
                scales = case.attrs.kv_scales[store is cache.values]  # type: ignore[index]
                fresh *= 2.0 ** rng.uniform(-10, 0, fresh.shape) / np.array(scales)[:, None]
            store[tables[s, position // size], position % size] = np.clip(fresh, -448, 448).astype(store.dtype)
    starts = np.cumsum([0] + [new for _, new in lengths]).astype(np.int32)
    step = Step(starts, np.array([sum(pair) for pair in lengths], np.int32), tables)
    return step, cache, rng.standard_normal((starts[-1], a.heads, a.head_dim)).astype(np.float32)


def expected(case: Case, step: Step, cache: KVCache, q: np.ndarray) -> np.ndarray:
    context = StepContext(case.block_size, step.query_start, step.context_len, step.block_tables, {0: cache})
    return reference(context, case.attrs, [q, *case.by_head()])[0]


lengths = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 40)), min_size=1, max_size=4)


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
@given(lengths=lengths, seed=st.integers(0, 2**32), threads=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_matches_reference_bit_for_bit_on_all_isa_levels(
    index: int, lengths: list[tuple[int, int]], seed: int, threads: int
) -> None:
    step, cache, q = make(CASES[index], lengths, seed)
    out = run(index, step, cache, q, ISAS[0], 1)
    np.testing.assert_allclose(out, expected(CASES[index], step, cache, q), rtol=1e-5, atol=1e-5)
    for isa in ISAS:
        np.testing.assert_array_equal(out.view(np.uint32), run(index, step, cache, q, isa, threads).view(np.uint32))


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_chunks_and_neighbours_change_no_bit(index: int) -> None:
    case, total = CASES[index], 530
    step, cache, q = make(case, [(0, total)], seed=7)
    whole = run(index, step, cache, q, ISAS[-1], 2)
    np.testing.assert_allclose(whole, expected(case, step, cache, q), rtol=1e-5, atol=1e-5)
    for chunk in (1, 7, 64, 300):
        for first in range(0 if chunk > 1 else total - 40, total, chunk):
            last = min(first + chunk, total)
            part = Step(np.array([0, last - first], np.int32), np.array([last], np.int32), step.block_tables)
            out = run(index, part, hide_after(cache, part, last, case.block_size), q[first:last], ISAS[0], 1)
            np.testing.assert_array_equal(out, whole[first:last], err_msg=f"tokens {first}:{last}")
    both = Step(
        np.array([0, 1, total + 1, total + 31], np.int32),
        np.array([200, total, 100], np.int32),
        np.concatenate([step.block_tables] * 3),
    )
    out = run(index, both, cache, np.concatenate([q[:1], q, q[:30]]), ISAS[0], 3)
    np.testing.assert_array_equal(out[1 : total + 1], whole)


def hide_after(cache: KVCache, step: Step, length: int, size: int) -> KVCache:
    """The cache as it is before the tokens from `length` on are written."""
    hidden = KVCache(cache.keys.copy(), cache.values.copy())
    later = np.arange(length, len(step.block_tables[0][step.block_tables[0] >= 0]) * size)
    for store in (hidden.keys, hidden.values):
        store[step.block_tables[0, later // size], later % size] = np.nan
    return hidden


def hide_before(case: Case, step: Step, cache: KVCache) -> tuple[Step, KVCache]:
    """Without the blocks that lie wholly before what the first query of each sequence sees: NaN, and no place. At least
    one of them has such blocks.
    """
    hidden, tables = KVCache(cache.keys.copy(), cache.values.copy()), step.block_tables.copy()
    before = step.context_len - np.diff(step.query_start)
    for s, position in enumerate(before):
        firsts = [0]
        if case.attrs.window is not None:
            firsts.append(position - case.attrs.window + 1)
        if case.attrs.chunk is not None:
            firsts.append(position - position % case.attrs.chunk)
        unseen = max(firsts) // case.block_size
        for store in (hidden.keys, hidden.values):
            store[tables[s, :unseen]] = np.nan
        tables[s, :unseen] = NOWHERE
    assert (tables != step.block_tables).any()
    return dataclasses.replace(step, block_tables=tables), hidden


BOUNDED = [i for i, case in enumerate(CASES) if case.attrs.window or case.attrs.chunk]


@pytest.mark.parametrize("index", BOUNDED, ids=[NAMES[i] for i in BOUNDED])
@pytest.mark.parametrize(
    "lengths", [[(1400, 1)], [(900, 1), (3, 1), (700, 1)], [(700, 40), (5, 9), (299, 3), (900, 130)]]
)
@pytest.mark.parametrize("isa", ISAS)
def test_blocks_before_all_that_is_seen_are_not_read(index: int, lengths: list[tuple[int, int]], isa: str) -> None:
    """A long sequence costs what its window does; its blocks may belong to others by then."""
    step, cache, q = make(CASES[index], lengths, seed=11)
    whole = run(index, step, cache, q, isa, 2)
    out = run(index, *hide_before(CASES[index], step, cache), q, isa, 2)
    np.testing.assert_array_equal(out.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("index", [2, 3])
def test_one_long_sequence_is_shared_by_all_threads(index: int, threads: int) -> None:
    step, cache, q = make(CASES[index], [(1400, 1)], seed=3)
    alone = run(index, step, cache, q, ISAS[0], 1)
    np.testing.assert_allclose(alone, expected(CASES[index], step, cache, q), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(alone, run(index, step, cache, q, ISAS[-1], threads))


def test_nan_in_a_query_stays_in_its_row() -> None:
    step, cache, q = make(CASES[0], [(30, 3)], seed=1)
    clean = run(0, step, cache, q, ISAS[0], 1)
    q[1, 4, 0] = np.nan
    out = run(0, step, cache, q, ISAS[0], 2)
    row = out[1].reshape(9, 64)
    assert np.isnan(row[4]).all()
    out[1].reshape(9, 64)[4] = clean[1].reshape(9, 64)[4]
    np.testing.assert_array_equal(out, clean)


def test_every_number_of_e4m3_is_read_as_it_is() -> None:
    """One key each: the value comes out as it is. NaN in the cache reaches the rows that see it, and no others."""
    case = CASES[-3]
    number = np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES["f8e4m3"])
    step, cache, q = make(case, [(0, 1)] * 4, seed=1)
    values = number.reshape(4, 1, 64).repeat(3, axis=1)
    cache.values[step.block_tables[:, 0], 0] = values
    out = run(len(CASES) - 3, step, cache, q, ISAS[0], 1).reshape(4, 3, 3, 64)
    scales = np.array(case.attrs.kv_scales[1], np.float32)  # type: ignore[index]
    want = values.astype(np.float32) * scales[:, None] + np.float32(0)
    np.testing.assert_array_equal(out, want[:, :, None].repeat(3, axis=2))
    assert np.isnan(out).sum() == 2 * 9
    cache.keys[step.block_tables[1, 0], 0, 2, 5] = np.nan
    rows = np.isnan(run(len(CASES) - 3, step, cache, q, ISAS[0], 1).reshape(4, 3, 3, 64)).all(-1)
    assert rows.tolist() == [[[s == 1 and head == 2] * 3 for head in range(3)] for s in range(4)]


def test_scales_of_other_heads_would_be_seen() -> None:
    """Each head's own scales count: with two exchanged the reference is far away."""
    case = CASES[-3]
    step, cache, q = make(case, [(20, 3)], seed=2)
    (a, b, c), values = case.attrs.kv_scales  # type: ignore[misc]
    other = dataclasses.replace(case, attrs=dataclasses.replace(case.attrs, kv_scales=((b, a, c), values)))
    out = run(len(CASES) - 3, step, cache, q, ISAS[0], 1)
    assert np.abs(out - expected(other, step, cache, q)).max() > 0.1


@pytest.mark.parametrize(("isa", "tiles"), [(ISAS[0], False), ("x86-64-amx", True)])
def test_scratch_formula_is_the_kernels(isa: str, tiles: bool) -> None:
    checks = [
        f"static_assert(llmc::PagedAttention<{c.attrs.heads}, {c.attrs.kv_heads}, {c.attrs.head_dim}, "
        f"{c.attrs.value_dim}, {c.block_size}, {KV_TYPES[c.kv_dtype]}, llmc::{PLAIN}>::scratch_bytes({n}) == "
        f"{paged_cpu.scratch_bytes(c.attrs, c.kv_dtype, n, tiles)});"
        for c in CASES
        for n in (1, 256, 257, 8192)
    ]
    build("\n".join(['#include "plugins/paged_attention/cpu.h"', *checks]), (isa,))


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="block_size=24"):
        paged_cpu.layer_bytes(1, 64, 64, 24, "f32")
    with pytest.raises(ValueError, match="kv dtype 'f16'"):
        paged_cpu.layer_bytes(1, 64, 64, 16, "f16")
    with pytest.raises(ValueError, match="needs the scales"):
        Case(Attrs(0, 4, 2, 8, 1.0), 16, "f8e4m3").launch()
    q = [TensorType("f32", ("T", 4, 8))]
    for broken in ({"heads": 3}, {"window": 0}, {"softcap": -1.0}, {"chunk": 0}, {"sinks": True}, {"head_dim": 9},
                   {"kv_scales": ((1.0,), (1.0, 1.0))}, {"kv_scales": ((1.0, 0.0), (1.0, 1.0))}):  # fmt: skip
        with pytest.raises(ValueError):
            infer(dataclasses.replace(Attrs(0, 4, 2, 8, 1.0), **broken), q)


@pytest.mark.parametrize(
    ("options", "by_head"),
    [({}, []), ({"window": 3}, []), ({"chunk": 4}, []), ({"slopes": True}, [0.3]), ({"sinks": True}, [0.7])],
)
def test_reference_against_the_definition(options: dict[str, Any], by_head: list[float]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 4)) for _ in range(3))
    context = StepContext(
        16,
        np.array([0, 6], np.int32),
        np.array([6], np.int32),
        np.array([[1]], np.int32),
        {0: KVCache(*np.zeros((2, 2, 16, 1, 4)))},
    )
    context.kv[0].keys[1, :6, 0], context.kv[0].values[1, :6, 0] = k, v
    given = [q[:, None].astype(np.float32), *(np.array([x], np.float32) for x in by_head)]
    out = reference(context, Attrs(0, 1, 1, 4, 0.5, **options), given)[0]
    for i in range(6):
        first = {"window": max(i - 2, 0), "chunk": i // 4 * 4}.get(*options, 0) if options else 0
        seen = list(range(first, i + 1))
        slope = by_head[0] if "slopes" in options else 0
        weights = np.exp([0.5 * q[i] @ k[j] + slope * (j - i) for j in seen])
        total = weights.sum() + (np.exp(by_head[0]) if "sinks" in options else 0)
        np.testing.assert_allclose(out[i], weights / total @ v[seen], rtol=1e-5)
