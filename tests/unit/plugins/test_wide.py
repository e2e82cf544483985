"""Kernels of the wide ISA levels beside those of x86-64-v3, bit for bit; emulated where this machine lacks a level."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest

from llmc.plugins.cpu.call import Pointer
from tests.unit.plugins import test_functions as functions
from tests.unit.plugins import test_linear as linear
from tests.unit.plugins.compiled import ISAS, compile_library
from tests.unit.plugins.harness import Library

WIDE = ("x86-64-v4", "x86-64-v4-vnni")
#: Of linear's cases: each format, with a gate, an activation, a shard's group, and a last panel that is not full.
PICKED = (3, 5, linear.INT4_SHARD, linear.INT8)
INT8_ONLY = (linear.INT8,)


def picked(isa: str) -> tuple[int, ...]:
    """VNNI differs from v4 in the products of INT8 alone."""
    return INT8_ONLY if isa == "x86-64-v4-vnni" else PICKED


@cache
def library(isa: str) -> Library:
    cases = [linear.CASES[i] for i in picked(isa)]
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())} for case in cases]
    return Library([case.call() for case in cases], isa, types)


@pytest.mark.parametrize(("isa", "case"), [(isa, case) for isa in WIDE for case in picked(isa)])
def test_linear_gives_the_bits_of_x86_64_v3(isa: str, case: int) -> None:
    chosen = linear.CASES[case]
    _, packed = linear.weights(chosen)
    for rows in (1, 5, 60):
        x = np.random.default_rng(rows).standard_normal((rows, chosen.k), np.float32)
        y = np.full((rows, chosen.width), np.nan, np.float32)
        library(isa).run(picked(isa).index(case), [x, *packed], [y], threads=2, tokens=rows)
        np.testing.assert_array_equal(y.view(np.uint32), linear.run(ISAS[0], case, x).view(np.uint32))


@pytest.mark.parametrize("name", functions.NAMES)
def test_functions_give_the_bits_of_x86_64_v3(name: str) -> None:
    x = functions.grid()[::7]
    operands = [x, np.roll(x, 1), np.roll(x, 2)][: functions.ARITY[name]]
    wide, narrow = (functions.compute(isa, name, *operands) for isa in ("x86-64-v4", "x86-64-v3"))
    np.testing.assert_array_equal(wide, narrow)  # NaN equals NaN, whatever its digits


@pytest.mark.parametrize("isa", WIDE)
def test_real_instructions_compile(isa: str) -> None:
    include = '#include "plugins/linear/cpu.h"\n#include "plugins/paged_attention/cpu.h"\n'
    value = "llmc::lin::WholeSums::add(llmc::lin::vload(p), llmc::lin::vload(p), llmc::lin::vzero())"
    compile_library(f"{include}void f(float* p) {{ llmc::lin::vstore(p, {value}); }}", isa, emulate=False)


_PROBE = """
#include "plugins/cpu/lanes.h"
namespace llmc {
extern "C" void probe(const float* a, const float* b, const float* c, float* out) {
  const __m512 x = _mm512_loadu_ps(a), y = _mm512_loadu_ps(b);
  const __m512i p = _mm512_castps_si512(x), q = _mm512_castps_si512(y), r = _mm512_castps_si512(_mm512_loadu_ps(c));
  _mm512_storeu_ps(out, _mm512_min_ps(x, y));
  _mm512_storeu_ps(out + 16, _mm512_max_ps(x, y));
  _mm512_storeu_ps(out + 32, _mm512_castsi512_ps(_mm512_cvtps_epi32(x)));
  _mm512_storeu_ps(out + 48, _mm512_castsi512_ps(_mm512_madd_epi16(p, q)));
  _mm512_storeu_ps(out + 64, _mm512_castsi512_ps(_mm512_dpwssd_epi32(r, p, q)));
  _mm512_storeu_ps(out + 80, _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm512_storeu_ps(out + 96, _mm512_insertf32x8(x, _mm512_extractf32x8_ps(y, 0), 1));
  _mm512_storeu_ps(out + 112, _mm512_maskz_loadu_ps(_mm512_cmp_ps_mask(x, y, _CMP_NGE_UQ), a));
}
}
"""


def test_instructions_do_what_their_description_says() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(16).astype(np.float32) * 40 for _ in range(3))
    a[:6], b[:6] = [np.nan, 1, 0, -0.0, 2.5, 3e9], [1, np.nan, -0.0, 0, 2.5, -1]
    out = np.zeros((8, 16), np.float32)
    probe = ctypes.CDLL(str(compile_library(_PROBE, "x86-64-v4-vnni"))).probe
    probe(*(ctypes.c_void_p(v.ctypes.data) for v in (a, b, c, out)))
    pairs = [v.view(np.int16).astype(np.int64).reshape(16, 2) for v in (a, b)]
    products = (pairs[0] * pairs[1]).sum(axis=1)
    with np.errstate(invalid="ignore"):
        whole = np.where(np.abs(a) < 2**31, np.rint(a), -(2.0**31)).astype(np.int64)
    want = [
        np.where(a < b, a, b),
        np.where(a > b, a, b),
        whole.astype(np.int32).view(np.float32),
        products.astype(np.int32).view(np.float32),
        (products + c.view(np.int32)).astype(np.int32).view(np.float32),
        np.rint(a),
        np.concatenate([a[:8], b[:8]]),
        np.where(~(a >= b), a, 0),
    ]
    np.testing.assert_array_equal(out.view(np.uint32), np.array(want, np.float32).view(np.uint32))
