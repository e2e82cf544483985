"""grouped_linear's kernels against the reference and against themselves: the same bits for any routing of other tokens,
any number of them, of threads, and any ISA level.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.weights.evaluation import apply
from llmc.builder.weights.recipe import parse
from llmc.plugins.all_reduce.cpu import comm_bytes, slot_bytes
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer
from llmc.plugins.grouped_linear import Attrs, infer, reference
from llmc.plugins.grouped_linear.cpu import launch
from llmc.plugins.linear import groups
from llmc.plugins.operator import StepContext
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.harness import Library

MOST = 150
CONTEXT = StepContext(16, np.array([0, 1]), np.array([1]), np.array([[0]]))
SWIGLU = "mul(mul(i0, sigmoid(i0)), i1)"
CLAMPED = "mul(add(minimum(maximum(i1, -2.0), 2.0), 1.0), mul(minimum(i0, 2.0), sigmoid(mul(minimum(i0, 2.0), 1.702))))"


@dataclass(frozen=True)
class Case:
    k: int
    n: int
    experts: int
    slots: int
    dtype: str
    per_slot: bool = False
    attrs: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    @property
    def values(self) -> Attrs:
        return Attrs(**self.attrs)

    def types(self) -> list[TensorType]:
        x = ("T", self.slots, self.k) if self.per_slot else ("T", self.k)
        vectors = (self.dtype in ("f8e4m3", "i8")) + self.values.bias
        by_group = (self.experts, self.n, groups(self.k, self.values.group_start))
        return [
            TensorType("f32", x),
            TensorType("i32", ("T", self.slots)),
            TensorType(self.dtype, (self.experts, self.n, self.k)),
            *[TensorType(kind, by_group) for kind in ("f16", "u4") if self.dtype == "u4"],
            *[TensorType("f32", (self.experts, self.n))] * vectors,
            *[TensorType("f32", ("T", self.slots))] * self.values.combine,
        ]

    def call(self) -> CpuCall:
        types = self.types()
        return launch(self.values, types, infer(self.values, types), KernelEnv((1, MOST), (1, 1)))


CASES = [
    Case(37, 70, 5, 2, "f32"),
    Case(40, 2 * 45, 7, 3, "f32", attrs={"gated": True, "expr": SWIGLU}),
    Case(130, 96, 4, 1, "bf16", attrs={"bias": True, "expr": "square(relu(i0))"}),
    Case(45, 72, 7, 3, "bf16", True, {"combine": True}),
    Case(64, 2 * 70, 6, 2, "f8e4m3", attrs={"x_per_token": True, "gated": True, "bias": True, "expr": CLAMPED}),
    Case(70, 64, 6, 2, "f8e4m3", True, {"combine": True, "bias": True}),
    Case(70, 64, 6, 2, "f8e4m3", True, {"x_per_token": True, "combine": True, "bias": True}),
    Case(300, 130, 3, 2, "f8e4m3", True, {"x_scale": 0.02, "combine": True}),
    Case(300, 2 * 70, 5, 2, "i8", attrs={"x_per_token": True, "gated": True, "bias": True, "expr": SWIGLU}),
    Case(71, 64, 6, 2, "i8", True, {"x_per_token": True, "combine": True}),
    Case(70, 72, 4, 3, "i8", attrs={"x_scale": 0.02, "expr": "square(relu(i0))"}),
    Case(300, 2 * 45, 5, 2, "u4", attrs={"gated": True, "expr": SWIGLU}),
    Case(70, 96, 4, 3, "u4", attrs={"bias": True, "expr": "square(relu(i0))"}),
    Case(200, 72, 7, 2, "u4", True, {"combine": True, "bias": True, "group_start": 100}),
    Case(70, 40, 4, 2, "f32", True, {"combine": True, "all_reduce": True}),
]
REDUCED = len(CASES) - 1


@cache
def library(isa: str) -> Library:
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types()[:5])} for case in CASES]
    return Library([case.call() for case in CASES], isa, types)


@cache
def weights(case: Case) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """The stacked weights (of INT4 with scales and zero points), the same in panels, the vectors that follow them."""
    rng, shape = np.random.default_rng(case.k), (case.experts, case.n, case.k)
    if case.dtype == "u4":
        numbers, (scale, zero) = rng.integers(0, 16, shape), (t.shape for t in case.types()[3:5])
        w = [
            numbers.astype(NUMPY_DTYPES["u4"]),
            (rng.random(scale) / np.sqrt(case.k) / 4).astype(np.float16),
            rng.integers(0, 16, zero).astype(NUMPY_DTYPES["u4"]),
        ]
    elif case.dtype == "i8":
        w = [rng.integers(-127, 128, shape).astype(np.int8)]
    else:
        w = [(rng.standard_normal(shape) / np.sqrt(case.k)).astype(NUMPY_DTYPES[case.dtype])]
    packing = case.call().packing
    packed = [aligned(apply(parse(packing[2 + i].format("load('w')")), [part])) for i, part in enumerate(w)]
    vectors = (case.dtype in ("f8e4m3", "i8")) + case.values.bias
    return w, packed, [aligned(rng.random((case.experts, case.n), np.float32) - 0.3) for _ in range(vectors)]


def inputs(case: Case, index: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, list[np.ndarray]]:
    """x and, where the results are combined, each token's weights."""
    shape = (len(index), case.slots, case.k) if case.per_slot else (len(index), case.k)
    x = rng.standard_normal(shape, np.float32)
    return x, [rng.random(index.shape, np.float32)] if case.values.combine else []


def run(isa: str, number: int, x: np.ndarray, index: np.ndarray, mix: list[np.ndarray], threads: int = 1) -> np.ndarray:
    case = CASES[number]
    _, packed, vectors = weights(case)
    (kind,) = infer(case.values, case.types())
    y = np.full((len(x), *kind.shape[1:]), np.nan, np.float32)
    library(isa).run(
        number, [x, np.ascontiguousarray(index, np.int32), *packed, *vectors, *mix], [y], threads, tokens=len(x)
    )
    return y


def routing(kind: str, case: Case, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """i32[tokens, slots] of experts, those of a token all different."""
    if kind == "alike":
        return np.tile(rng.permutation(case.experts)[: case.slots], (tokens, 1)).astype(np.int32)
    few = case.experts if kind == "spread" else case.slots  # the others get no token
    return np.array([rng.permutation(few)[: case.slots] for _ in range(tokens)], np.int32)


@settings(max_examples=80, deadline=None)
@given(
    number=st.integers(0, len(CASES) - 2),
    tokens=st.integers(1, 40) | st.sampled_from([64, 65, 120, MOST]),
    kind=st.sampled_from(["alike", "spread", "few"]),
    threads=st.integers(1, 4),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 99),
)
def test_matches_the_reference_and_each_token_alone(
    number: int, tokens: int, kind: str, threads: int, isa: str, seed: int
) -> None:
    case, rng = CASES[number], np.random.default_rng(seed)
    index = routing(kind, case, tokens, rng)
    x, mix = inputs(case, index, rng)
    y = run(isa, number, x, index, mix, threads)
    w, _, vectors = weights(case)
    (expected,) = reference(CONTEXT, case.values, [x, index, *w, *vectors, *mix])
    # Of a row's size: experts may cancel out, and INT8's outputs are in the thousands.
    size = np.abs(expected).max(axis=-1, keepdims=True) + 1e-3
    np.testing.assert_allclose(y / size, expected / size, rtol=0, atol=1e-5)
    for token in {0, tokens - 1, int(rng.integers(tokens))}:
        one = slice(token, token + 1)
        alone = run("x86-64-v3", number, x[one], index[one], [m[one] for m in mix])
        np.testing.assert_array_equal(alone.view(np.uint32), y[one].view(np.uint32))


def test_int8_gives_the_bits_of_x86_64_v3_on_amx() -> None:
    numbers = [number for number, case in enumerate(CASES) if case.dtype == "i8"]
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(CASES[n].types()[:5])} for n in numbers]
    tiles = Library([CASES[n].call() for n in numbers], "x86-64-amx", types)
    for at, number in enumerate(numbers):
        case, rng = CASES[number], np.random.default_rng(number)
        _, packed, vectors = weights(case)
        for tokens in (1, 5, 64):
            index = routing("spread", case, tokens, rng)
            x, mix = inputs(case, index, rng)
            want = run(ISAS[0], number, x, index, mix)
            y = np.full(want.shape, np.nan, np.float32)
            tiles.run(at, [x, index, *packed, *vectors, *mix], [y], 3, tokens=tokens)
            np.testing.assert_array_equal(y.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
def test_an_order_of_slots_changes_nothing(isa: str) -> None:
    number = 5
    case, rng = CASES[number], np.random.default_rng(3)
    index = routing("spread", case, 70, rng)
    x, (mix,) = inputs(case, index, rng)
    y = run(isa, number, x, index, [mix])
    turned = run(isa, number, x[:, ::-1].copy(), index[:, ::-1].copy(), [mix[:, ::-1].copy()])
    np.testing.assert_array_equal(y, turned)


@pytest.mark.parametrize("tokens", [1, 5, 80])
def test_sums_over_ranks(tokens: int) -> None:
    case, rng = CASES[REDUCED], np.random.default_rng(0)
    w, packed, vectors = weights(case)
    index = routing("spread", case, tokens, rng)
    halves = [inputs(case, index, rng)[0] for _ in range(2)]
    mix = rng.random(index.shape, np.float32)
    slot = slot_bytes(MOST, case.n)
    comm = aligned(np.zeros(comm_bytes(MOST, case.n, 2), np.uint8))
    ys = [np.zeros((tokens, case.n), np.float32) for _ in range(2)]

    def rank(number: int) -> None:
        library(ISAS[-1]).run(
            REDUCED, [halves[number], index, *packed, *vectors, mix], [ys[number]], threads=2, tokens=tokens,
            comm=comm.ctypes.data, slot=slot, rank_number=number, tp=2,
        )  # fmt: skip

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    first, second = (reference(CONTEXT, case.values, [x, index, *w, *vectors, mix])[0] for x in halves)
    np.testing.assert_allclose(ys[0], first + second, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ys[0], ys[1])


@pytest.mark.parametrize(
    ("attrs", "types", "reason"),
    [
        ({}, ["f32[T,8]", "i32[T,2]", "f32[4,6,9]"], "does not go with index"),
        ({}, ["f32[T,3,8]", "i32[T,2]", "f32[4,6,8]"], "does not go with index"),
        ({}, ["f32[T,8]", "f32[T,2]", "f32[4,6,8]"], "expected x, index i32\\[T,k\\] and w"),
        ({"x_scale": 1.0}, ["f32[T,8]", "i32[T,2]", "f32[4,6,8]"], "at most one, and only for f8e4m3 and i8"),
        ({}, ["f32[T,8]", "i32[T,2]", "i8[4,6,8]", "f32[4,6]"], "beside an i8 weight x is rounded"),
        ({"x_scale": 1e-46}, ["f32[T,8]", "i32[T,2]", "f8e4m3[4,6,8]", "f32[4,6]"], "not a positive float32"),
        ({"gated": True, "expr": "mul(i0, i1)"}, ["f32[T,8]", "i32[T,2]", "f32[4,5,8]"], "an even number of rows"),
        ({"gated": True}, ["f32[T,8]", "i32[T,2]", "f32[4,6,8]"], "does not read exactly i0 and i1"),
        ({"combine": True}, ["f32[T,8]", "i32[T,2]", "f32[4,6,8]"], "after w come"),
        ({"combine": True, "expr": "neg(i0)"}, ["f32[T,8]", "i32[T,2]", "f32[4,6,8]", "f32[T,2]"], "is combined"),
        ({"all_reduce": True}, ["f32[T,8]", "i32[T,2]", "f32[4,6,8]"], "only combined results"),
    ],
)
def test_refuses_types_that_do_not_fit(attrs: dict[str, Any], types: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        infer(Attrs(**attrs), [TensorType.parse(t) for t in types])
