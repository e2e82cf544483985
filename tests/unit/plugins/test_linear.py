"""linear's kernels against the reference and against themselves: the same bits for any rows, threads and ISA level."""

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.weights.evaluation import apply
from llmc.builder.weights.recipe import parse
from llmc.plugins.all_reduce.cpu import comm_bytes, slot_bytes
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer
from llmc.plugins.linear import INT8_COLUMNS, Attrs, groups, infer, quantize_x, quantize_x_int8, reference
from llmc.plugins.linear.cpu import launch
from llmc.plugins.operator import StepContext
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.harness import Library

MOST = 300
CONTEXT = StepContext(16, np.array([0, 1]), np.array([1]), np.array([[0]]))


@dataclass(frozen=True)
class Case:
    k: int
    n: int
    dtype: str
    least: int = 1
    attrs: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    def types(self) -> list[TensorType]:
        attrs = Attrs(**self.attrs)
        by_row, by_column = TensorType("f32", (self.n,)), TensorType("f32", (self.k,))
        vectors = [by_row] * (self.dtype in ("f8e4m3", "i8")) + [by_column] * attrs.x_factors + [by_row] * attrs.bias
        weight = TensorType(self.dtype, (self.n, self.k))
        if self.dtype == "u4":
            shape = (self.n, groups(self.k, attrs.group_start))
            vectors = [TensorType("f16", shape), TensorType("u4", shape), *vectors]
        return [TensorType("f32", ("T", self.k)), weight, *vectors]

    def call(self) -> CpuCall:
        attrs, types = Attrs(**self.attrs), self.types()
        return launch(attrs, types, infer(attrs, types), KernelEnv((self.least, MOST), (1, 1)))

    @property
    def width(self) -> int:
        width = infer(Attrs(**self.attrs), self.types())[0].shape[1]
        assert isinstance(width, int)
        return width


CASES = [
    Case(37, 70, "f32"),
    Case(130, 150, "f32", attrs={"bias": True, "epilogue": "silu_gate"}),
    Case(300, 64, "bf16", attrs={"bias": True, "epilogue": "gelu"}),
    Case(65, 130, "bf16", attrs={"epilogue": "gelu_tanh_gate"}),
    Case(576, 192, "f8e4m3", attrs={"x_scale": 0.02}),
    Case(129, 200, "f8e4m3", attrs={"x_per_token": True, "bias": True, "epilogue": "relu"}),
    Case(100, 150, "f8e4m3", attrs={"x_scale": 0.02, "bias": True, "epilogue": "silu_gate"}),
    Case(1, 2, "f8e4m3", attrs={"x_per_token": True, "epilogue": "gelu_gate"}),
    Case(300, 100, "f8e4m3", 40, {"x_per_token": True, "epilogue": "silu"}),
    Case(300, 192, "u4"),
    Case(576, 150, "u4", attrs={"bias": True, "epilogue": "silu_gate"}),
    Case(320, 70, "u4", attrs={"group_start": 64}),
    Case(50, 64, "u4", 40, {"group_start": 100, "epilogue": "silu"}),
    Case(129, 96, "u4", attrs={"bias": True, "all_reduce": True}),
    Case(577, 192, "i8", attrs={"x_per_token": True, "x_factors": True, "bias": True}),
    Case(300, 150, "i8", attrs={"x_per_token": True, "bias": True, "epilogue": "silu_gate"}),
    Case(1, 3, "i8", attrs={"x_scale": 0.02, "x_factors": True}),
    Case(1025, 70, "i8", 40, {"x_per_token": True, "epilogue": "gelu"}),
    Case(129, 96, "i8", attrs={"x_per_token": True, "x_factors": True, "bias": True, "all_reduce": True}),
    Case(129, 200, "f8e4m3", attrs={"bias": True, "epilogue": "silu_gate"}),
    Case(200, 130, "f8e4m3"),
    Case(64, 64, "f8e4m3", attrs={"x_scale": 0.37}),
    Case(70, 96, "f8e4m3", attrs={"x_scale": 0.02, "bias": True, "all_reduce": True}),
]
EXACT, IDENTITY, REDUCED = len(CASES) - 3, len(CASES) - 2, len(CASES) - 1
INT8_REDUCED = EXACT - 2
INT8, INT8_STATIC = INT8_REDUCED - 4, INT8_REDUCED - 2
INT4_REDUCED = INT8 - 1
INT4, INT4_SHARD = (INT4_REDUCED - i for i in (4, 2))


@cache
def library(isa: str) -> Library:
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())} for case in CASES]
    return Library([case.call() for case in CASES], isa, types)


@cache
def weights(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The inputs behind x, and the same as the kernel reads them."""
    rng = np.random.default_rng(case.k)
    w = rng.standard_normal((case.n, case.k), np.float32)
    if case.dtype == "f8e4m3":
        w *= np.exp2(rng.integers(-12, 7, w.shape))  # subnormals and large values
        w[rng.random(w.shape) < 0.01] = 448
    if case.dtype == "u4":
        w = rng.integers(0, 16, w.shape)
    if case.dtype == "i8":
        w = rng.integers(-128, 128, w.shape)
    plain = [w.astype(NUMPY_DTYPES[case.dtype])]
    for kind in case.types()[2:]:
        value = rng.integers(0, 16, kind.shape) if kind.dtype == "u4" else rng.random(kind.shape, np.float32) - 0.3
        plain.append(value.astype(NUMPY_DTYPES[kind.dtype]))
    packing = case.call().packing
    recipes = [parse(packing[i].format("load('w')")) if i in packing else None for i in range(1, len(plain) + 1)]
    packed = [apply(recipe, [v]) if recipe else v for recipe, v in zip(recipes, plain, strict=True)]
    return plain, [aligned(value) for value in packed]


def run(isa: str, case: int, x: np.ndarray, threads: int = 1, spread: int = 0) -> np.ndarray:
    """y; with `spread`, x and y have rows that lie further apart."""
    _, packed = weights(CASES[case])
    y = np.full((len(x), CASES[case].width + spread), np.nan, np.float32)
    wide = np.full((len(x), x.shape[1] + spread), np.nan, np.float32)
    wide[:, : x.shape[1]] = x
    library(isa).run(case, [wide[:, : x.shape[1]], *packed], [y[:, : CASES[case].width]], threads, tokens=len(x))
    assert np.isnan(y[:, CASES[case].width :]).all()
    return y[:, : CASES[case].width]


@settings(max_examples=120, deadline=None)
@given(
    case=st.sampled_from([i for i, case in enumerate(CASES) if not case.attrs.get("all_reduce")]),
    rows=st.integers(1, 26) | st.sampled_from([27, 48, 49, 96, 200, MOST]),
    threads=st.integers(1, 4),
    isa=st.sampled_from(ISAS),
    spread=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
@example(case=7, rows=49, threads=1, isa=ISAS[0], spread=0, seed=90)
def test_matches_the_reference_and_each_row_alone(
    case: int, rows: int, threads: int, isa: str, spread: int, seed: int
) -> None:
    chosen = CASES[case]
    rows = max(rows, chosen.least)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, chosen.k), np.float32)
    x[rng.integers(rows)] *= rng.choice([0, 1e-6, 100])
    y = run(isa, case, x, threads, spread)
    plain, _ = weights(chosen)
    (expected,) = reference(CONTEXT, Attrs(**chosen.attrs), [x, *plain])
    size = np.abs(expected).max(axis=1, keepdims=True) + 1e-3
    if chosen.attrs.get("epilogue", "").startswith("gelu"):  # it cancels: its error is measured by its argument
        (before,) = reference(CONTEXT, Attrs(**{**chosen.attrs, "epilogue": "none"}), [x, *plain])
        size = np.maximum(size, np.abs(before).max(axis=1, keepdims=True))
    np.testing.assert_allclose(y / size, expected / size, rtol=0, atol=3e-6)
    picked = sorted({0, rows - 1, int(rng.integers(rows))})
    if chosen.least == 1:
        alone = np.concatenate([run("x86-64-v3", case, x[i : i + 1]) for i in picked])
    else:
        alone = run("x86-64-v3", case, np.repeat(x[picked], chosen.least, axis=0))[:: chosen.least]
    np.testing.assert_array_equal(alone.view(np.uint32), y[picked].view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 5, 60])
def test_every_output_is_one_chain_over_k(isa: str, rows: int) -> None:
    chosen = CASES[4]
    x = np.random.default_rng(7).standard_normal((rows, chosen.k), np.float32)
    w, scale = weights(chosen)[0]
    q, x_scale = quantize_x(x, chosen.attrs["x_scale"])
    total = np.zeros((rows, chosen.n), np.float32)
    for k in range(chosen.k):  # products of two E4M3 are exact, and float64 holds their sum with a float32 exactly
        product = q[:, k, None].astype(np.float64) * w[None, :, k].astype(np.float64)
        total = (total.astype(np.float64) + product).astype(np.float32)
    expected = total * (x_scale * scale)
    np.testing.assert_array_equal(run(isa, 4, x), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 5, 60])
def test_a_float_input_is_multiplied_as_it_is(isa: str, rows: int) -> None:
    """The powers of two that E4M3 weights are decoded with round nothing, however large or small a row is."""
    chosen = CASES[EXACT]
    rng = np.random.default_rng(7)
    x = rng.standard_normal((rows, chosen.k), np.float32) * np.exp2(rng.integers(-90, 90, (rows, 1))).astype(np.float32)
    x[:, 1:] *= np.exp2(rng.integers(-12, 1, chosen.k - 1)).astype(np.float32)
    w, scale = weights(chosen)[0]
    total = np.zeros((rows, chosen.n), np.float32)
    for k in range(chosen.k):  # float64 holds a product of 24 and 4 bits exactly
        product = x[:, k, None].astype(np.float64) * w[None, :, k].astype(np.float64)
        total = (total.astype(np.float64) + product).astype(np.float32)
    np.testing.assert_array_equal(run(isa, EXACT, x), total * scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("case", [INT4, INT4_SHARD])
def test_an_int4_output_adds_one_group_after_the_other(isa: str, rows: int, case: int) -> None:
    chosen = CASES[case]
    start = chosen.attrs.get("group_start", 0)
    x = np.random.default_rng(7).integers(-99, 100, (rows, chosen.k)).astype(np.float32) / 8
    w, scale, zero = (v.astype(np.float64) for v in weights(chosen)[0])
    total = np.zeros((rows, chosen.n), np.float32)
    for group, columns in enumerate(np.split(np.arange(chosen.k), np.arange(128 - start, chosen.k, 128))):
        # x and q have few bits: sums of their products are exact in any order, and the kernel rounds only what follows.
        exact = x[:, columns].astype(np.float64) @ (w[:, columns] - zero[:, [group]]).T
        total = (total + exact * scale[:, group]).astype(np.float32)  # float64 holds a float32 and the product exactly
    np.testing.assert_array_equal(run(isa, case, x), total)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("case", [INT8, INT8_STATIC])
def test_int8_is_summed_exactly(isa: str, rows: int, case: int) -> None:
    """Whatever the row: zeros, numbers too small for a scale, huge outliers, the largest products there are."""
    chosen = CASES[case]
    rng = np.random.default_rng(11)
    x = rng.standard_normal((rows, chosen.k), np.float32) * np.exp2(rng.integers(-90, 90, (rows, 1))).astype(np.float32)
    x[0] = -1e33
    for row, value in zip(x[1:5], (0, 1e-44, 1e36, -1e-38), strict=False):
        row[:] = 0
        row[-1] = value
    (expected,) = reference(CONTEXT, Attrs(**chosen.attrs), [x, *weights(chosen)[0]])
    np.testing.assert_array_equal(run(isa, case, x), expected)


def test_int8_sums_at_the_edge_of_32_bits() -> None:
    """As many products as are admitted, each the largest there is."""
    case = Case(INT8_COLUMNS, 2, "i8", attrs={"x_per_token": True})
    x = np.ones((1, case.k), np.float32)
    w = np.full((2, case.k), -128, np.int8)
    w[1] = 127
    packed = [aligned(apply(parse("panels(load('w'), 64)"), [w])), aligned(np.ones(2, np.float32))]
    y = np.zeros((1, 2), np.float32)
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())}]
    Library([case.call()], ISAS[0], types).run(0, [x, *packed], [y], tokens=1)
    scale = np.float32(1) / np.float32(127)
    np.testing.assert_array_equal(y[0], np.array([-128, 127], np.float32) * np.float32(127 * case.k) * scale)


def test_rounds_x_to_int8() -> None:
    x = np.array([[0, 0, 0], [1e-44, 0, 0], [254, 127.5, -1], [np.nan, 1, 2], [1, np.inf, 2]], np.float32)
    numbers, scale = quantize_x_int8(x, None)
    np.testing.assert_array_equal(numbers[:3], [[0, 0, 0], [0, 0, 0], [127, 64, 0]])
    np.testing.assert_array_equal(scale[:, 0], np.array([1, 1, 2, np.nan, np.nan], np.float32))
    numbers, scale = quantize_x_int8(x, 0.5)
    np.testing.assert_array_equal(numbers[2], [127, 127, -2])
    np.testing.assert_array_equal(np.isnan(scale[:, 0]), [False, False, False, True, True])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 9])
def test_quantizes_x_as_numpy_does(isa: str, rows: int) -> None:
    case = CASES[IDENTITY]
    packed = apply(parse("panels(load('w'), 64)"), [np.eye(64, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn)])
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    middles = (grid[1:] + grid[:-1]) / 2
    exact = np.concatenate([grid, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
    extreme = np.array([1e-45, -1e-45, 1e-30, 448.1, 464, 1e30, np.inf, -np.inf], np.float32)
    values = np.concatenate([exact, extreme]) * np.float32(case.attrs["x_scale"])
    values = np.resize(values, (-(-len(values) // (64 * rows)) * rows, 64)).astype(np.float32)
    one = aligned(np.ones(64, np.float32))
    for start in range(0, len(values), rows):
        x = values[start : start + rows]
        y = np.zeros_like(x)
        library(isa).run(IDENTITY, [x, aligned(packed), one], [y], tokens=rows)
        q, scale = quantize_x(x, case.attrs["x_scale"])
        np.testing.assert_array_equal(y, q.astype(np.float32) * scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", [0, 4, 5, INT4, INT8, INT8_STATIC])
def test_nan_stays_in_its_row(isa: str, case: int) -> None:
    x = np.ones((7, CASES[case].k), np.float32)
    x[3, -1] = np.nan
    y = run(isa, case, x)
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("number", [REDUCED, INT4_REDUCED, INT8_REDUCED])
def test_sums_over_ranks_and_adds_the_bias_once(rows: int, number: int) -> None:
    case = CASES[number]
    plain, packed = weights(case)
    slot = slot_bytes(MOST, case.n)
    comm = aligned(np.zeros(comm_bytes(MOST, case.n, 2), np.uint8))
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((rows, case.k), np.float32) for _ in range(2)]
    ys = [np.zeros((rows, case.n), np.float32) for _ in range(2)]

    def rank(i: int) -> None:
        library(ISAS[-1]).run(
            number, [xs[i], *packed], [ys[i]], threads=2, tokens=rows,
            comm=comm.ctypes.data, slot=slot, rank_number=i, tp=2,
        )  # fmt: skip

    ranks = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    partial = Attrs(**(case.attrs | {"bias": False}))
    first, second = (reference(CONTEXT, partial, [x, *plain[:-1]])[0] for x in xs)
    np.testing.assert_allclose(ys[0], first + second + plain[-1], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(ys[0], ys[1])


@pytest.mark.parametrize(
    ("attrs", "types", "reason"),
    [
        ({}, ["f32[T,8]", "f32[4,9]"], "K must be the same"),
        (
            {"x_scale": 1.0, "x_per_token": True},
            ["f32[T,8]", "f8e4m3[4,8]", "f32[4]"],
            "at most one, and only for f8e4m3",
        ),
        ({"x_scale": 1.0}, ["f32[T,8]", "f32[4,8]"], "at most one, and only for f8e4m3"),
        ({}, ["f32[T,8]", "i8[4,8]", "f32[4]"], "x_scale or x_per_token is missing"),
        ({"x_per_token": True, "x_factors": True}, ["f32[T,8]", "i8[4,8]", "f32[4]", "f32[4]"], "after w come"),
        ({"x_per_token": True, "x_factors": True}, ["f32[T,8]", "f8e4m3[4,8]", "f32[4]", "f32[8]"], "only for i8"),
        ({"x_per_token": True}, ["f32[T,131073]", "i8[4,131073]", "f32[4]"], "could leave 32 bits"),
        ({"x_scale": -1.0}, ["f32[T,8]", "f8e4m3[4,8]", "f32[4]"], "not a positive float32"),
        ({"x_scale": 1e-46}, ["f32[T,8]", "f8e4m3[4,8]", "f32[4]"], "not a positive float32"),
        ({"epilogue": "swish"}, ["f32[T,8]", "f32[4,8]"], "'swish' is not one of"),
        ({"epilogue": "silu_gate"}, ["f32[T,8]", "f32[5,8]"], "an even number of rows"),
        ({"epilogue": "silu", "all_reduce": True}, ["f32[T,8]", "f32[4,8]"], "of a partial sum"),
        ({"bias": True}, ["f32[T,8]", "f32[4,8]"], "after w come"),
        ({}, ["f32[T,8]", "f16[4,8]"], "expected f32, bf16, f8e4m3, i8 or u4"),
        ({}, ["f32[8]"], "expected x"),
        ({}, ["f32[T,8]", "u4[4,8]", "f16[4,2]", "u4[4,2]"], "after w come"),
        ({"x_per_token": True}, ["f32[T,8]", "u4[4,8]", "f16[4,1]", "u4[4,1]"], "only for f8e4m3"),
        ({"group_start": 128}, ["f32[T,8]", "u4[4,8]", "f16[4,1]", "u4[4,1]"], "not within 0..127"),
        ({"group_start": 1}, ["f32[T,8]", "bf16[4,8]"], "the weight is not u4"),
    ],
)
def test_refuses_types_that_do_not_fit(attrs: dict[str, Any], types: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        infer(Attrs(**attrs), [TensorType.parse(t) for t in types])
