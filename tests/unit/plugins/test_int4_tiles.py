"""INT4 linear layers in AMX tiles: the reference with x rounded to bf16, groups in order, the same bits for any rows,
shards that begin within a group. Emulated where this machine lacks tiles.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.weights.evaluation import apply
from llmc.builder.weights.recipe import parse
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.linear import Attrs, dequantize, reference
from tests.unit.plugins.compiled import aligned, compile_library
from tests.unit.plugins.harness import Library
from tests.unit.plugins.test_bf16_products import rounded, tile_by_tile
from tests.unit.plugins.test_linear import CONTEXT, MOST, Case, weights

ISA = "x86-64-amx"
#: More groups than a block has, with a last one of odd length; a gate; a first group of odd length; less than a step;
#: a step of few columns that needs more words than it has numbers; two shards of a weight, cut within a group.
LONG, GATED, ODD, SHORT, ONE, LEFT, RIGHT, NUMBERS = range(8)
CASES = [
    Case(1000 + 37, 70, "u4", attrs={"bias": True, "epilogue": "gelu"}),
    Case(576, 150, "u4", attrs={"bias": True, "epilogue": "silu_gate"}),
    Case(300, 200, "u4", attrs={"group_start": 101}),
    Case(50, 64, "u4", 40, {"group_start": 100, "epilogue": "silu"}),
    Case(1, 64, "u4", attrs={"group_start": 127}),
    Case(192, 70, "u4"),
    Case(192, 70, "u4", attrs={"group_start": 64}),
    Case(16, 64, "u4"),
]
IDS = [f"{c.k}x{c.n}" for c in CASES]


@cache
def library() -> Library:
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())} for case in CASES]
    return Library([case.call() for case in CASES], ISA, types)


def run(case: int, x: np.ndarray, packed: list[np.ndarray] | None = None, threads: int = 1) -> np.ndarray:
    y = np.full((len(x), CASES[case].width), np.nan, np.float32)
    library().run(case, [x, *(packed or weights(CASES[case])[1])], [y], threads, tokens=len(x))
    return y


def in_panels(case: int, plain: list[np.ndarray]) -> list[np.ndarray]:
    packing = CASES[case].call().packing
    return [aligned(apply(parse(packing[i].format("load('w')")), [v])) for i, v in enumerate(plain, 1)]


def random_x(rows: int, case: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, CASES[case].k), np.float32)


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
@pytest.mark.parametrize("rows", [75, MOST])
def test_is_the_reference_of_x_in_bf16_and_each_row_alone(case: int, rows: int) -> None:
    chosen = CASES[case]
    x = random_x(rows, case)
    x[4] = 0
    y = run(case, x, threads=3)
    (expected,) = reference(CONTEXT, Attrs(**chosen.attrs), [rounded(x), *weights(chosen)[0]])
    size = np.abs(expected).max(axis=1, keepdims=True) + 1e-3
    np.testing.assert_allclose(y / size, expected / size, rtol=0, atol=3e-6)
    for count in (1, 2, 16, 17, 32, 33) if chosen.least == 1 else (40,):
        for first in (0, 4, rows - count):
            alone = run(case, x[first : first + count])
            np.testing.assert_array_equal(alone.view(np.uint32), y[first : first + count].view(np.uint32))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("case", [ODD, LEFT, RIGHT], ids=["odd", "left", "right"])
def test_adds_a_group_s_tiles_then_one_group_after_the_other(case: int, rows: int) -> None:
    chosen = CASES[case]
    start = chosen.attrs.get("group_start", 0)
    x = random_x(rows, case)
    w, scale, zero = (v.astype(np.float32) for v in weights(chosen)[0])
    total = np.zeros((rows, chosen.n), np.float32)
    for group, columns in enumerate(np.split(np.arange(chosen.k), np.arange(128 - start, chosen.k, 128))):
        empty = ((0, 0), (0, -len(columns) % 32))
        numbers = w[:, columns] - zero[:, [group]]
        sums = tile_by_tile(np.pad(rounded(x[:, columns]), empty), np.pad(numbers, empty))
        # float64 holds a float32 times a float16 exactly.
        total = (total + sums.astype(np.float64) * scale[:, group]).astype(np.float32)
    np.testing.assert_array_equal(run(case, x), total)


def test_every_number_and_zero_point_is_exact() -> None:
    """Output n has zero point n % 16, column k holds k: an identity reads each."""
    shape = (CASES[NUMBERS].n, CASES[NUMBERS].k)
    w = np.broadcast_to(np.arange(16), shape).astype(NUMPY_DTYPES["u4"])
    zero = (np.arange(shape[0]) % 16)[:, None].astype(NUMPY_DTYPES["u4"])
    packed = in_panels(NUMBERS, [w, np.ones((shape[0], 1), np.float16), zero])
    want = np.arange(16)[:, None] - np.arange(shape[0])[None] % 16
    np.testing.assert_array_equal(run(NUMBERS, np.eye(16, dtype=np.float32), packed), want.astype(np.float32))


@pytest.mark.parametrize("rows", [1, 40])
def test_shards_that_share_a_group_sum_to_the_whole(rows: int) -> None:
    rng = np.random.default_rng(rows)
    numbers = rng.integers(0, 16, (70, 384)).astype(NUMPY_DTYPES["u4"])
    scale, zero = rng.random((70, 3)).astype(np.float16), rng.integers(0, 16, (70, 3)).astype(NUMPY_DTYPES["u4"])
    x = rng.standard_normal((rows, 384), np.float32)
    left = in_panels(LEFT, [numbers[:, :192].copy(), scale[:, :2].copy(), zero[:, :2].copy()])
    right = in_panels(RIGHT, [numbers[:, 192:].copy(), scale[:, 1:].copy(), zero[:, 1:].copy()])
    parts = run(LEFT, x[:, :192].copy(), left) + run(RIGHT, x[:, 192:].copy(), right)
    np.testing.assert_allclose(parts, rounded(x) @ dequantize(numbers, scale, zero).T, rtol=1e-5, atol=2e-4)


def test_what_is_no_number_stays_in_its_row() -> None:
    x = np.ones((40, CASES[ODD].k), np.float32)
    x[3, -1], x[20, 0] = np.nan, np.inf
    x[7] = 1e-40  # bf16 products take subnormals for zeros
    y = run(ODD, x)
    assert np.isnan(y[3]).all()
    assert not np.isfinite(y[20]).any()
    assert not y[7].any()
    assert np.isfinite(np.delete(y, [3, 20], axis=0)).all()


def test_real_instructions_compile() -> None:
    call = CASES[GATED].call()
    values = "x, 576, lin::Grouped{0}, w, nullptr, b, y, 75"
    arguments = "const Ctx& c, const float* x, lin::Int4Weight w, const float* b, float* y"
    text = f"void f({arguments}) {{ {call.function}(c, 0, 1, {values}); }}"
    compile_library(f'#include "plugins/linear/cpu.h"\nnamespace llmc {{\n{text}\n}}', ISA, emulate=False)
