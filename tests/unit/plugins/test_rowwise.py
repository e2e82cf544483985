"""Norms, embedding, rows, reductions, copies, formulas: kernels against references, ISA level against ISA level."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins import OPERATORS, cpu_launch
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer
from llmc.plugins.operator import StepContext
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.harness import Library

ENV = KernelEnv((1, 64), (0, 64))
VOCABULARY = 50


@dataclass(frozen=True)
class Case:
    op: str
    inputs: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> list[TensorType]:
        return [TensorType.parse(text) for text in self.inputs]

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return OPERATORS[self.op].infer(self.values, self.types)

    @property
    def values(self) -> Any:
        return OPERATORS[self.op].attrs(**self.attrs)

    def call(self) -> CpuCall:
        return cpu_launch(self.op)(self.values, self.types, self.outputs, ENV)


CASES = [
    Case("rms_norm", ("f32[T,577]", "f32[577]"), {"eps": 1e-5}),
    Case("rms_norm", ("f32[T,64]", "f32[64]", "f32[T,64]"), {"eps": 1e-6, "residual": True}),
    Case("rms_norm", ("f32[T,3,7]", "f32[7]"), {"eps": 1e-5}),
    Case("layer_norm", ("f32[T,77]", "f32[77]", "f32[77]", "f32[T,77]"), {"eps": 1e-5, "residual": True}),
    Case("layer_norm", ("f32[T,5,32]", "f32[32]", "f32[32]"), {"eps": 1e-5}),
    Case("layer_norm", ("f32[T,9]", "f32[9]", "f32[9]"), {"eps": 1e-12}),
    Case("embedding", ("i32[T]", f"bf16[{VOCABULARY},70]")),
    Case("embedding", ("i32[T]", f"f32[{VOCABULARY},70]")),
    Case("select_rows", ("f32[T,70]", "i32[S]")),
    Case("reduce", ("f32[T,3,70]",), {"kind": "mean"}),
    Case("reduce", ("f32[T,70]",), {"kind": "max", "keepdim": False}),
    Case("reduce", ("f32[T,7]",), {"kind": "sum"}),
    Case("reduce", ("f32[T,32]",), {"kind": "max"}),
    Case("mean_squares", ("f32[T,70]", "f32[T,24]"), {"widths": (140, 24)}),
    Case("copy", ("f32[T,9,64]",), {"kind": "transpose", "perm": (1, 0, 2)}),
    Case("copy", ("f32[T,9,8]",), {"kind": "transpose", "perm": (0, 2, 1)}),
    Case("copy", ("f32[T,70]",), {"kind": "transpose", "perm": (1, 0)}),
    Case("copy", ("f32[T,70]",), {"kind": "slice", "axis": 1, "start": 3, "stop": 65, "step": 2}),
    Case("copy", ("f32[T,9,8]",), {"kind": "slice", "axis": -2, "start": 3, "stop": 7}),
    Case("copy", ("i32[T,9,8]", "i32[T,2,8]", "i32[T,1,8]"), {"kind": "concat", "axis": 1}),
    Case("copy", ("f32[T,9]", "f32[T,3]"), {"kind": "concat", "axis": -1}),
    Case("copy", ("f32[9,1]",), {"kind": "broadcast", "shape": ("T", 9, 4)}),
    Case("pointwise", ("f32[T,300]", "f32[300]", "f32[]"), {"expr": "add(mul(i0, sigmoid(i1)), pow(i2, 3.0))"}),
    Case("pointwise", ("f32[T,3,70]", "f32[T,1,1]"), {"expr": "maximum(sub(i0, i1), mul(i0, -0.5))"}),
    Case("pointwise", ("i32[T]",), {"expr": "i0"}),
    Case("pointwise", ("i32[T,1]", "f32[37]"), {"expr": "cos(mul(i0, i1))"}),
    Case("pointwise", ("f32[2,T,3,5]", "f32[T,1,5]"), {"expr": "minimum(div(i0, i1), 1e30)"}),
    Case("pointwise", ("f32[T,33]",), {"expr": "mul(tanh(div(i0, 30.0)), 30.0)"}),
]


@cache
def library(isa: str) -> Library:
    named = [
        {Pointer("in", i): t.dtype for i, t in enumerate(case.types)}
        | {Pointer("out", i): t.dtype for i, t in enumerate(case.outputs)}
        for case in CASES
    ]
    return Library([case.call() for case in CASES], isa, named)


def values(kind: TensorType, symbols: dict[str, int], rng: np.random.Generator, limit: int) -> np.ndarray:
    shape = [symbols[d] if isinstance(d, str) else d for d in kind.shape]
    if kind.dtype == "i32":
        return aligned(rng.integers(0, limit, shape).astype(np.int32))
    return aligned((rng.standard_normal(shape) * 3).astype(NUMPY_DTYPES[kind.dtype]))


def spread(value: np.ndarray) -> np.ndarray:
    """The same matrix in rows that lie further apart."""
    wide = np.full((value.shape[0], value.shape[1] + 5), 7, value.dtype)
    wide[:, : value.shape[1]] = value
    return wide[:, : value.shape[1]]


def run(isa: str, number: int, inputs: list[np.ndarray], symbols: dict[str, int], threads: int) -> list[np.ndarray]:
    outputs = []
    for j, kind in enumerate(CASES[number].outputs):
        shape = [symbols[d] if isinstance(d, str) else d for d in kind.shape]
        value = aligned(np.full(shape, 77, NUMPY_DTYPES[kind.dtype]))
        outputs.append(spread(value) if Pointer("out", j) in CASES[number].call().strided else value)
    library(isa).run(number, inputs, outputs, threads, tokens=symbols["T"], rows=symbols["S"])
    return outputs


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(0, len(CASES) - 1),
    tokens=st.integers(1, 40),
    rows=st.integers(0, 5),
    threads=st.integers(1, 4),
    apart=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kernels_match_references(number: int, tokens: int, rows: int, threads: int, apart: bool, seed: int) -> None:
    case = CASES[number]
    operator, symbols = OPERATORS[case.op], {"T": tokens, "S": rows}
    rng = np.random.default_rng(seed)
    inputs = [values(t, symbols, rng, tokens if case.op == "select_rows" else VOCABULARY) for t in case.types]
    context = StepContext(16, np.array([0, tokens]), np.array([tokens]), np.array([[0]]))
    expected = operator.reference(context, case.values, inputs)
    given_inputs = [spread(x) if apart and Pointer("in", i) in case.call().strided else x for i, x in enumerate(inputs)]
    results = [run(isa, number, given_inputs, symbols, threads) for isa in ISAS]
    for got, want in zip(results[0], expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=4e-6, atol=2e-6)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    for number, case in enumerate(CASES):
        if case.op not in ("rms_norm", "layer_norm", "reduce"):
            continue
        inputs = [values(t, {"T": 9, "S": 1}, rng, 9) for t in case.types]
        together = run(ISAS[-1], number, inputs, {"T": 9, "S": 1}, 3)
        row = [aligned(x[4:5]) if "T" in t.shape else x for x, t in zip(inputs, case.types, strict=True)]
        alone = run(ISAS[-1], number, row, {"T": 1, "S": 1}, 1)
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[4])


def test_maximum_is_nan_where_any_is() -> None:
    number = next(i for i, c in enumerate(CASES) if c.attrs == {"kind": "max", "keepdim": False})
    for column in (0, 69):
        x = aligned(np.ones((3, 70), np.float32))
        x[1, column] = np.nan
        (y,) = run(ISAS[-1], number, [x], {"T": 3, "S": 0}, 1)
        np.testing.assert_array_equal(y, [1, np.nan, 1])


def test_norms_of_huge_and_tiny_rows_are_finite() -> None:
    for number in (0, 5):
        case = CASES[number]
        width = case.types[0].shape[1]
        x = np.ones((2, int(width)), np.float32) * np.array([[1e18], [1e-30]], np.float32)
        x[:, ::2] *= -1
        inputs = [aligned(x), *(aligned(np.ones(int(width), np.float32)) for _ in case.types[1:])]
        (y,) = run(ISAS[-1], number, inputs, {"T": 2, "S": 0}, 1)
        assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "reason"),
    [
        ("rms_norm", ("f32[T,8]", "f32[9]"), {"eps": 1e-5}, "expected f32"),
        ("layer_norm", ("f32[T,8]", "f32[8]"), {"eps": 1e-5}, "expected f32"),
        ("embedding", ("f32[T]", "f32[9,8]"), {}, "expected ids i32"),
        ("select_rows", ("f32[T,8]", "f32[S]"), {}, "expected x"),
        ("reduce", ("f32[T,8]",), {"kind": "median"}, "'median' is not one of"),
        ("reduce", ("f32[T,8]",), {"kind": "sum", "axis": 0}, "is not the last"),
        ("copy", ("f32[T,8]",), {"kind": "slice", "axis": 1, "start": 3, "stop": 9}, "3:9:1 is no range"),
        ("copy", ("f32[T,8]",), {"kind": "slice", "axis": 0, "stop": 2}, "is symbolic"),
        ("copy", ("bf16[T,8]",), {"kind": "transpose", "perm": (1, 0)}, "no elements of 4 bytes"),
        ("copy", ("f32[T,8]", "f32[T,8]"), {"kind": "transpose", "perm": (1, 0)}, "with 2 inputs"),
        ("copy", ("f32[T,8]", "f32[S,8]"), {"kind": "concat", "axis": 1}, "does not join"),
        ("copy", ("f32[T,8]",), {"kind": "broadcast", "shape": ("T", 9)}, "does not broadcast"),
        ("pointwise", ("f32[T,8]",), {"expr": "foo(i0)"}, "foo in .* is not an elementwise function"),
        ("pointwise", ("f32[T,8]",), {"expr": "add(i0)"}, "takes 2 operands, not 1"),
        ("pointwise", ("f32[T,8]",), {"expr": "i0.shape"}, "neither an input, a number nor a call"),
        ("pointwise", ("f32[T,8]",), {"expr": "add(i0, i1)"}, "does not read exactly the inputs"),
        ("pointwise", ("f32[T,8]", "f32[7]"), {"expr": "add(i0, i1)"}, "do not broadcast"),
        ("pointwise", ("f32[T,8]",), {"expr": "add(i0,"}, "is no expression"),
    ],
)
def test_refuses_types_that_do_not_fit(op: str, inputs: tuple[str, ...], attrs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _ = Case(op, inputs, attrs).outputs


@pytest.mark.parametrize(
    "case",
    [
        Case("pointwise", ("f32[2,2,T,2,2]",), {"expr": "exp(i0)"}),
        Case("copy", ("f32[2,2,T,2,2]",), {"kind": "transpose", "perm": (1, 0, 2, 3, 4)}),
    ],
)
def test_names_what_the_target_cannot_do(case: Case) -> None:
    with pytest.raises(UnsupportedError, match="at most 4 axes"):
        case.call()
