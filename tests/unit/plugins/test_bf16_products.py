"""linear on the levels that multiply bf16: the reference with x rounded to bf16, the order of sums, the same bits for
any rows. Emulated where this machine lacks a level.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest

from llmc.builder.weights.evaluation import apply
from llmc.builder.weights.recipe import parse
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.linear import Attrs, quantize_x, reference
from tests.unit.plugins.compiled import BF16_ISAS, aligned, compile_library
from tests.unit.plugins.harness import Library
from tests.unit.plugins.test_linear import CONTEXT, Case, weights

#: More columns than a block has, and panels that are not full; the last two have a K that AMX does not take, or is odd.
PLAIN, GATED, DECODED, UNEVEN, ODD = range(5)
CASES = [
    Case(608, 70, "bf16"),
    Case(96, 150, "f8e4m3", attrs={"bias": True, "epilogue": "silu_gate"}),
    Case(64, 64, "f8e4m3"),
    Case(34, 64, "f8e4m3", 40, {"x_per_token": True}),
    Case(33, 64, "bf16", 40),
]


@cache
def library(isa: str) -> Library:
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())} for case in CASES]
    return Library([case.call() for case in CASES], isa, types)


def run(isa: str, case: int, x: np.ndarray, packed: list[np.ndarray] | None = None, threads: int = 1) -> np.ndarray:
    y = np.full((len(x), CASES[case].width), np.nan, np.float32)
    library(isa).run(case, [x, *(packed or weights(CASES[case])[1])], [y], threads, tokens=len(x))
    return y


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def random_x(rows: int, case: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, CASES[case].k), np.float32)


@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("case", [PLAIN, GATED, UNEVEN, ODD])
def test_is_the_reference_of_x_in_bf16_and_each_row_alone(isa: str, case: int) -> None:
    chosen = CASES[case]
    x = random_x(75, case)
    x[4] = 0
    y = run(isa, case, x, threads=3)
    attrs = Attrs(**chosen.attrs)
    if case == UNEVEN:  # x becomes E4M3, which bf16 holds
        q, scale = quantize_x(x, None)
        given = q.astype(np.float32) * scale
        attrs = Attrs()
    else:
        given = x if case == ODD else rounded(x)
    (expected,) = reference(CONTEXT, attrs, [given, *weights(chosen)[0]])
    size = np.abs(expected).max(axis=1, keepdims=True) + 1e-3
    np.testing.assert_allclose(y / size, expected / size, rtol=0, atol=5e-6)
    for count in (1, 5, 20, 33) if chosen.least == 1 else (40,):
        for first in (0, 4, 75 - count):
            alone = run(isa, case, x[first : first + count])
            np.testing.assert_array_equal(alone.view(np.uint32), y[first : first + count].view(np.uint32))


def fused(total: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """total + x w^T, rounded once: float64 holds a product of two bf16 and its sum with a float32."""
    product = x[:, None].astype(np.float64) * w[None, :].astype(np.float64)
    return (total.astype(np.float64) + product).astype(np.float32)


def pair_by_pair(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """VDPBF16PS: of each pair the second product is added first."""
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(0, x.shape[1], 2):
        total = fused(fused(total, x[:, k + 1], w[:, k + 1]), x[:, k], w[:, k])
    return total


def tile_by_tile(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """TDPBF16PS: even and odd columns of 32 apart, then both."""
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], 32):
        parts = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(start, start + 32):
            parts[k % 2] = fused(parts[k % 2], x[:, k], w[:, k])
        total += parts[0] + parts[1]
    return total


@pytest.mark.parametrize(("isa", "order"), zip(BF16_ISAS, (pair_by_pair, tile_by_tile), strict=True))
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_sums_in_the_order_of_the_instruction(isa: str, order: object, rows: int) -> None:
    x = random_x(rows, PLAIN)
    w = weights(CASES[PLAIN])[0][0].astype(np.float32)
    assert callable(order)
    np.testing.assert_array_equal(run(isa, PLAIN, x), order(rounded(x), w))


@pytest.mark.parametrize("isa", BF16_ISAS)
def test_every_e4m3_weight_is_exact(isa: str) -> None:
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    w = np.resize(numbers[np.isfinite(numbers.astype(np.float32))], (64, 64))
    packed = [aligned(apply(parse("panels(load('w'), 64)"), [w])), aligned(np.ones(64, np.float32))]
    np.testing.assert_array_equal(run(isa, DECODED, np.eye(64, dtype=np.float32), packed), w.T.astype(np.float32))


@pytest.mark.parametrize("isa", BF16_ISAS)
def test_what_is_no_number_stays_in_its_row(isa: str) -> None:
    x = np.ones((40, CASES[PLAIN].k), np.float32)
    x[3, -1], x[20, 0] = np.nan, np.inf
    x[7] = 1e-40  # bf16 products take subnormals for zeros
    y = run(isa, PLAIN, x)
    assert np.isnan(y[3]).all()
    assert not np.isfinite(y[20]).any()
    assert not y[7].any()
    assert np.isfinite(np.delete(y, [3, 20], axis=0)).all()


@pytest.mark.parametrize("isa", BF16_ISAS)
def test_real_instructions_compile(isa: str) -> None:
    call = CASES[PLAIN].call()
    values = "x, 608, lin::Plain{}, w, nullptr, nullptr, y, 70"
    text = f"void f(const Ctx& c, const float* x, const bf16* w, float* y) {{ {call.function}(c, 0, 1, {values}); }}"
    compile_library(f'#include "plugins/linear/cpu.h"\nnamespace llmc {{\n{text}\n}}', isa, emulate=False)
