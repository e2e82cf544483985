"""paged_attention with products of bf16 (AMX): the reference of rounded queries, and the same bits alone, in any chunk,
beside any neighbour. Emulated where this machine lacks AMX.
"""

from __future__ import annotations

import ctypes
import functools

import ml_dtypes
import numpy as np
import pytest

from llmc.plugins.operator import KVCache
from llmc.plugins.paged_attention import Attrs
from tests.unit.plugins.compiled import aligned, compile_library
from tests.unit.plugins.native_step import Rank, Step, build, pack, source
from tests.unit.plugins.test_attention import Case, expected, hide_after, hide_before, make

ISA = "x86-64-amx"
#: Groups of 3, 4, 1, 24 and 71; a scale below 0; blocks in which values lie in tiles and those that are copied; windows
#: that begin between tiles; a cache of FP8; last, heads that no tile takes.
CASES = [
    Case(Attrs(0, 9, 3, 64, 0.125), 16, "bf16"),
    Case(Attrs(0, 8, 2, 128, 0.09, window=300), 32, "bf16"),
    Case(Attrs(0, 4, 4, 96, 0.1, window=37, softcap=30.0), 16, "bf16"),
    Case(Attrs(0, 24, 1, 32, 0.2, v_dim=64, sinks=True), 256, "bf16"),
    Case(Attrs(0, 4, 2, 64, 0.1, v_dim=96, slopes=True), 64, "bf16"),
    Case(Attrs(0, 71, 1, 64, 0.125, chunk=100), 32, "bf16"),
    Case(Attrs(0, 2, 1, 256, -0.06), 16, "bf16"),
    Case(Attrs(0, 9, 3, 64, 0.125, kv_scales=((0.25, 0.013, 3.0), (1.0, 0.5, 0.07))), 16, "f8e4m3"),
    Case(Attrs(0, 4, 2, 96, 0.1, v_dim=64, window=70, kv_scales=((0.1, 0.3), (0.2, 2.0))), 64, "f8e4m3"),
    Case(Attrs(0, 4, 2, 40, 0.2), 16, "bf16"),
]
NAMES = [f"{c.attrs.heads}over{c.attrs.kv_heads}x{c.attrs.head_dim}-{c.kv_dtype}" for c in CASES]
TILED = range(len(CASES) - 1)


@functools.cache
def compiled() -> ctypes.CDLL:
    return build(source([case.launch(tiles=True) for case in CASES]), (ISA,))[ISA]


def run(index: int, step: Step, cache: KVCache, q: np.ndarray, threads: int = 1) -> np.ndarray:
    case = CASES[index]
    launches = [case.launch(tiles=True) for case in CASES]
    rank = Rank(compiled(), launches, threads, pack(cache, case.kv_dtype, index in TILED))
    out = np.full((len(q), q.shape[1] * case.attrs.value_dim), np.nan, np.float32)
    assert rank.call(index, step, [q, *case.by_head()], [out]) == 0
    rank.close()
    return out


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
@pytest.mark.parametrize("lengths", [[(0, 300)], [(700, 3), (0, 40), (16, 17), (255, 1), (256, 1), (31, 9)]])
def test_is_the_reference_of_queries_in_bf16(index: int, lengths: list[tuple[int, int]]) -> None:
    case = CASES[index]
    step, cache, q = make(case, lengths, seed=5)
    given = q.astype(ml_dtypes.bfloat16).astype(np.float32) if index in TILED else q
    out, want = run(index, step, cache, q, threads=2), expected(case, step, cache, given)
    # Weights are rounded, too: by 2^-9 at most, and their sums by less.
    bound = 2e-3 if index in TILED else 1e-5
    assert np.sqrt(np.mean((out - want) ** 2) / np.mean(want**2)) < bound
    assert np.abs(out - want).max() < 5 * bound * np.abs(want).max()


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_chunks_and_neighbours_give_the_same_bits(index: int) -> None:
    case, total = CASES[index], 330
    step, cache, q = make(case, [(0, total)], seed=7)
    whole = run(index, step, cache, q, threads=2)
    assert np.isfinite(whole).all()
    for chunk in (1, 2, 7, 64, 300):
        for first in range(0 if chunk > 2 else total - 40, total, chunk):
            last = min(first + chunk, total)
            part = Step(np.array([0, last - first], np.int32), np.array([last], np.int32), step.block_tables)
            out = run(index, part, hide_after(cache, part, last, case.block_size), q[first:last])
            np.testing.assert_array_equal(
                out.view(np.uint32), whole[first:last].view(np.uint32), err_msg=f"tokens {first}:{last}"
            )
    both = Step(
        np.array([0, 1, total + 1, total + 31], np.int32),
        np.array([200, total, 100], np.int32),
        np.concatenate([step.block_tables] * 3),
    )
    out = run(index, both, cache, np.concatenate([q[:1], q, q[:30]]), threads=3)
    np.testing.assert_array_equal(out[1 : total + 1].view(np.uint32), whole.view(np.uint32))


BOUNDED = [i for i, case in enumerate(CASES) if case.attrs.window]


@pytest.mark.parametrize("index", BOUNDED, ids=[NAMES[i] for i in BOUNDED])
@pytest.mark.parametrize(
    "lengths", [[(1400, 1)], [(900, 1), (3, 1), (700, 1)], [(700, 40), (5, 9), (299, 3), (900, 130)]]
)
def test_blocks_before_all_that_is_seen_are_not_read(index: int, lengths: list[tuple[int, int]]) -> None:
    step, cache, q = make(CASES[index], lengths, seed=11)
    whole = run(index, step, cache, q, threads=2)
    out = run(index, *hide_before(CASES[index], step, cache), q, threads=2)
    np.testing.assert_array_equal(out.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("size", [1e-3, 1e-19, 1e-30])
def test_tiny_numbers_are_the_same_bits_in_every_chunk(size: float) -> None:
    """Products below the smallest normal float count as zeros."""
    case, total = CASES[0], 40
    step, cache, q = make(case, [(0, total)], seed=3)
    for store in (cache.keys, cache.values):
        store[...] = (store.astype(np.float32) * size).astype(store.dtype)
    q *= size
    whole = run(0, step, cache, q)
    for last in range(total - 3, total + 1):
        part = Step(np.array([0, 1], np.int32), np.array([last], np.int32), step.block_tables)
        out = run(0, part, cache, q[last - 1 : last])
        np.testing.assert_array_equal(out.view(np.uint32), whole[last - 1 : last].view(np.uint32))


_WIDEN = """
#include "plugins/cpu/fp8.h"
extern "C" void widen(const void* from, void* to) { llmc::widen<256>(static_cast<const llmc::fp8*>(from), to); }
"""


@pytest.mark.parametrize("normal", [False, True])
def test_every_number_of_fp8_is_itself_in_bf16(normal: bool) -> None:
    """Those that are normal alone have a way of their own."""
    given = np.arange(256, dtype=np.uint8)
    if normal:
        given[((given & 0x78) == 0) | ((given & 0x7F) == 0x7F)] = 0x38
    given, out = aligned(given), aligned(np.zeros(256, ml_dtypes.bfloat16))
    ctypes.CDLL(str(compile_library(_WIDEN, ISA))).widen(*(ctypes.c_void_p(x.ctypes.data) for x in (given, out)))
    want = given.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(out.astype(np.float32), want)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(out.astype(np.float32))[known], np.signbit(want)[known])
