"""INT8 linear layers in AMX tiles: whole numbers are exact, so the bits are those of any level. Emulated elsewhere."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from llmc.plugins.cpu.call import Pointer
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.harness import Library
from tests.unit.plugins.test_linear import Case, weights

ISA = "x86-64-amx"
#: More columns than a block has, panels that are not full; the last K is none that tiles take.
CASES = [
    Case(1152, 70, "i8", attrs={"x_per_token": True, "x_factors": True, "bias": True}),
    Case(192, 150, "i8", attrs={"x_per_token": True, "bias": True, "epilogue": "silu_gate"}),
    Case(64, 64, "i8", 20, {"x_scale": 0.02, "epilogue": "gelu"}),
    Case(100, 64, "i8", attrs={"x_per_token": True}),
]


@cache
def library(isa: str) -> Library:
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())} for case in CASES]
    return Library([case.call() for case in CASES], isa, types)


def run(isa: str, case: int, x: np.ndarray, threads: int) -> np.ndarray:
    y = np.full((len(x), CASES[case].width), np.nan, np.float32)
    library(isa).run(case, [x, *weights(CASES[case])[1]], [y], threads, tokens=len(x))
    return y


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{c.k}x{c.n}" for c in CASES])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_are_those_of_any_level(case: int, threads: int) -> None:
    for rows in (1, 2, 15, 16, 17, 33, 75) if CASES[case].least == 1 else (20, 33):
        x = np.random.default_rng(rows).standard_normal((rows, CASES[case].k), np.float32)
        x[rows // 2] *= 1e4
        got, want = run(ISA, case, x, threads), run(ISAS[0], case, x, 1)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=f"{rows} rows")


def test_what_is_no_number_stays_in_its_row() -> None:
    x = np.ones((40, CASES[0].k), np.float32)
    x[3, -1], x[20, 0] = np.nan, np.inf
    y = run(ISA, 0, x, 2)
    assert np.isnan(y[[3, 20]]).all()
    assert np.isfinite(np.delete(y, [3, 20], axis=0)).all()
