"""rowwise: programs against the reference, any rows, threads and ISA level giving the same bits; what is refused."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import KernelEnv, Pointer
from llmc.plugins.operator import StepContext
from llmc.plugins.rowwise import Attrs, infer, reference
from llmc.plugins.rowwise.cpu import launch
from llmc.plugins.rowwise.functions import top
from tests.unit.plugins.compiled import ISAS
from tests.unit.plugins.harness import Library

MOST = 70
CONTEXT = StepContext(16, np.array([0, 1]), np.array([1]), np.array([[0]]))

SOFTMAX = ("reduce_max(i0)", "exp(sub(i0, v0))", "reduce_sum(v1)", "div(v1, v2)")
#: name -> (types of the inputs, program)
PROGRAMS: dict[str, tuple[list[str], Attrs]] = {
    "softmax, best 3, renormalised": (
        ["f32[T,37]"],
        Attrs((*SOFTMAX, "topk(v3, 3)", "gather(v3, v4)", "reduce_sum(v5)", "div(v5, v6)"), ("v7", "v4")),
    ),
    "sigmoid, bias, best groups": (
        ["f32[T,24]", "f32[24]"],
        Attrs(
            (
                "sigmoid(i0)",
                "add(v0, w1)",
                "reshape(v1, 4, 6)",
                "topk(v2, 2)",
                "gather(v2, v3)",
                "reduce_sum(v4)",
                "reshape(v5, 4)",
                "topk(v6, 2)",
                "fill(0.0, 4)",
                "scatter(v8, v7, 1.0)",
                "reshape(v9, 4, 1)",
                "fill(v10, 4, 6)",
                "reshape(v11, 24)",
                "where(logical_not(bool(v12)), -inf, v1)",
                "topk(v13, 5)",
                "gather(v0, v14)",
                "mul(div(v15, 2.5), 1.5)",
            ),
            ("v16", "v14"),
        ),
    ),
    "masks and pieces": (
        ["f32[T,20]", "i32[T]", "f32[20]"],
        Attrs(
            (
                "slice(i0, 0, 3, 20, 2)",
                "bottomk(v0, 4)",
                "concat(v0, v0)",
                "where(logical_and(gt(v2, 0.25), le(v2, 1.0)), v2, 0.0)",
                "scatter(i0, v1, 7.0)",
                "eq(f32(i1), w2)",
                "i32(where(v5, v4, mul(i0, 3.7)))",
                "where(logical_or(ne(i0, 0.0), lt(i0, -1.0)), 2.0, 3.0)",
                "reduce_mean(i0)",
            ),
            ("v1", "v3", "v6", "v7", "v8"),
        ),
    ),
}  # fmt: skip


@cache
def library(isa: str) -> Library:
    calls, dtypes = [], []
    for texts, attrs in PROGRAMS.values():
        types = [TensorType.parse(t) for t in texts]
        outputs = infer(attrs, types)
        calls.append(launch(attrs, types, outputs, KernelEnv((1, MOST), (1, 1))))
        dtypes.append(
            {Pointer("in", i): t.dtype for i, t in enumerate(types)}
            | {Pointer("out", i): t.dtype for i, t in enumerate(outputs)}
        )
    return Library(calls, isa, dtypes)


def arrays(name: str, rows: int, seed: int) -> list[np.ndarray]:
    """Inputs with ties, so that the order of equals matters."""
    rng = np.random.default_rng(seed)
    made = []
    for kind in map(TensorType.parse, PROGRAMS[name][0]):
        shape = [rows if d == "T" else int(d) for d in kind.shape]
        value = np.arange(np.prod(shape)).reshape(shape) if kind.shape != ("T",) and kind.rank == 1 else None
        if value is None:
            value = rng.integers(0, 20, shape) if kind.dtype == "i32" else rng.standard_normal(shape).round(1)
        made.append(np.ascontiguousarray(value, NUMPY_DTYPES[kind.dtype]))
    return made


def run(isa: str, name: str, inputs: list[np.ndarray], threads: int = 1) -> list[np.ndarray]:
    texts, attrs = PROGRAMS[name]
    kinds = infer(attrs, [TensorType.parse(t) for t in texts])
    rows = len(inputs[0])
    outputs = [np.zeros((rows, *map(int, k.shape[1:])), NUMPY_DTYPES[k.dtype]) for k in kinds]
    library(isa).run(list(PROGRAMS).index(name), inputs, outputs, threads, tokens=rows)
    return outputs


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(PROGRAMS)),
    rows=st.integers(1, MOST),
    threads=st.integers(1, 4),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 99),
)
def test_matches_the_reference_and_each_row_alone(name: str, rows: int, threads: int, isa: str, seed: int) -> None:
    inputs = arrays(name, rows, seed)
    have = run(isa, name, inputs, threads)
    want = reference(CONTEXT, PROGRAMS[name][1], inputs)
    weight = [t.startswith("f32[2") for t in PROGRAMS[name][0]]
    row = rows // 2
    alone = run(ISAS[0], name, [x if w else x[row : row + 1] for x, w in zip(inputs, weight, strict=True)])
    for got, expected, one in zip(have, want, alone, strict=True):
        if expected.dtype == np.int32:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(one.view(np.uint32), got[row : row + 1].view(np.uint32))


@pytest.mark.parametrize("largest", [True, False])
def test_the_best_are_those_of_pytorch(largest: bool) -> None:
    import torch

    rng = np.random.default_rng(1)
    x = np.array([rng.permutation(30) for _ in range(5)], np.float32)
    x[1, 4], x[2, 7], x[3, 9] = np.nan, np.inf, -np.inf
    wanted = torch.topk(torch.tensor(x), 6, dim=-1, largest=largest).indices.numpy()
    np.testing.assert_array_equal(top(x, 6, largest), wanted)


def test_of_equals_the_first_is_best() -> None:
    assert top(np.array([[1.0, 3.0, 3.0, 1.0]], np.float32), 3).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize(
    ("types", "steps", "results", "reason"),
    [
        (["f32[T,4]"], ("exp(i0, i0)",), ("v0",), "takes 1 operands"),
        (["f32[T,4]"], ("exq(i0)",), ("v0",), "exq is no function"),
        (["f32[T,4]"], ("exp(topk(i0, 2))",), ("v0",), "none that a formula may contain"),
        (["f32[T,4]"], ("exp(v3)",), ("v0",), "no value before it"),
        (["f32[T,4]"], ("topk(i0, 5)",), ("v0",), "5 best"),
        (["f32[T,4]"], ("gather(i0, i0)",), ("v0",), "does not index"),
        (["f32[T,4]"], ("gt(i0, 0.5)",), ("v0",), "truth value"),
        (["f32[T,4]"], ("reshape(i0, 3)",), ("v0",), "not as many"),
        (["f32[T,4]"], ("exp(i0)",), ("v1",), "no values of the program"),
        (["f32[4]"], ("exp(w0)",), ("v0",), "rows over T or over S"),
        (["f32[T,4]", "i32[T,4]"], ("add(i0, i1)",), ("v0",), "add of"),
        (["f32[T,4]"], ("where(i0, i0, 1.0)",), ("v0",), "no truth value"),
    ],
)
def test_refuses_programs_that_do_not_fit(
    types: list[str], steps: tuple[str, ...], results: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        infer(Attrs(steps, results), [TensorType.parse(t) for t in types])
