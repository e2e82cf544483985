"""Row programs, reductions and movements of the cuda targets against their references, interpreted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.all_reduce import OPERATOR as ALL_REDUCE
from llmc.plugins.all_reduce import Attrs as AllReduceAttrs
from llmc.plugins.copy import OPERATOR as COPY
from llmc.plugins.copy import Attrs as CopyAttrs
from llmc.plugins.cuda.call import Collective
from llmc.plugins.mean_squares import OPERATOR as MEAN_SQUARES
from llmc.plugins.mean_squares import Attrs as MeanSquaresAttrs
from llmc.plugins.reduce import KINDS
from llmc.plugins.reduce import OPERATOR as REDUCE
from llmc.plugins.reduce import Attrs as ReduceAttrs
from llmc.plugins.rowwise import OPERATOR as ROWWISE
from llmc.plugins.rowwise import Attrs as RowwiseAttrs
from llmc.plugins.select_rows import OPERATOR as SELECT_ROWS
from llmc.plugins.select_rows import Attrs as SelectRowsAttrs
from tests.unit.cuda.harness import check, environment, execute, launches, plain_step
from tests.unit.plugins.test_row_programs import PROGRAMS, arrays

Shape = tuple[int | str, ...]


def random(shape: Shape, tokens: int, dtype: str = "f32", seed: int = 0) -> np.ndarray:
    sizes = [tokens if isinstance(d, str) else d for d in shape]
    return (np.random.default_rng(seed).standard_normal(sizes) * 100).astype(NUMPY_DTYPES[dtype])


@pytest.mark.parametrize("name", PROGRAMS)
@given(rows=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_row_programs(name: str, rows: int, seed: int) -> None:
    texts, attrs = PROGRAMS[name]
    step = plain_step(rows)
    types = [TensorType.parse(text) for text in texts]
    found = execute(ROWWISE, attrs, types, arrays(name, rows, seed), step, environment(step))
    for got, want in zip(found, ROWWISE.reference(step.context, attrs, arrays(name, rows, seed)), strict=True):
        if want.dtype == np.int32:
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("largest", [True, False])
def test_the_best_with_what_is_no_number(largest: bool) -> None:
    x = np.array([[np.nan, -0.0, 0.0, np.inf, -np.inf, 2, 2, np.nan], [5, 4, np.nan, 3, -1, 0, -0.0, 1]], np.float32)
    attrs = RowwiseAttrs((f"{'topk' if largest else 'bottomk'}(i0, 8)", "reduce_max(i0)"), ("v0", "v1"))
    step = plain_step(2)
    check(ROWWISE, attrs, [TensorType("f32", ("T", 8))], [x], step, environment(step))


def test_a_program_of_too_many_numbers_is_refused() -> None:
    step = plain_step(1)
    attrs = RowwiseAttrs(("mul(i0, 2.0)",), ("v0",))
    with pytest.raises(UnsupportedError, match="20000 numbers"):
        launches(ROWWISE, attrs, [TensorType("f32", ("T", 20000))], environment(step))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "keepdim"), [(("T", 37), True), (("T", 5, 24), False), (("T", 600), False)])
def test_reduce(kind: str, shape: Shape, keepdim: bool) -> None:
    step = plain_step(3)
    x = random(shape, 3)
    check(REDUCE, ReduceAttrs(kind, -1, keepdim), [TensorType("f32", shape)], [x], step, environment(step), atol=1e-4)
    x.reshape(3, -1)[1, 2] = np.nan
    check(REDUCE, ReduceAttrs(kind, -1, keepdim), [TensorType("f32", shape)], [x], step, environment(step), atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_mean_squares(dtype: str) -> None:
    step = plain_step(3)
    types = [TensorType("f32", ("T", 40)), TensorType("f32", ("T", 70))]
    inputs = [random(("T", 40), 3), random(("T", 70), 3, seed=1)]
    env = environment(step, stored={("in", 0): dtype})
    check(MEAN_SQUARES, MeanSquaresAttrs((80, 70)), types, inputs, step, env)


def test_select_rows() -> None:
    """A row number below 0 is a padded one: nothing is read or written for it."""
    step = plain_step(4, rows=3)
    types = [TensorType("f32", ("T", 1100)), TensorType("i32", ("S",))]
    x = random(("T", 1100), 4)
    check(SELECT_ROWS, SelectRowsAttrs(), types, [x, np.array([3, 0, 2], np.int32)], step, environment(step), 0, 0)
    (got,) = execute(
        SELECT_ROWS, SelectRowsAttrs(), types, [x, np.array([3, -1, 2], np.int32)], step, environment(step)
    )
    np.testing.assert_array_equal(got[[0, 2]], x[[3, 2]])
    assert np.isnan(got[1]).all()


COPIES: list[tuple[CopyAttrs, list[Shape]]] = [
    (CopyAttrs("transpose", perm=(0, 2, 1)), [("T", 3, 5)]),
    (CopyAttrs("transpose", perm=(1, 0)), [(7, 40)]),
    (CopyAttrs("transpose", perm=(0, 3, 1, 2)), [("T", 2, 3, 5)]),
    (CopyAttrs("slice", axis=1, start=2, stop=9, step=3), [("T", 10)]),
    (CopyAttrs("slice", axis=-2, start=1, stop=3), [("T", 4, 6)]),
    (CopyAttrs("slice", axis=0, start=1, stop=6, step=2), [(7, 5)]),
    (CopyAttrs("concat", axis=1), [("T", 5), ("T", 1030)]),
    (CopyAttrs("concat", axis=-1), [("T", 2, 3), ("T", 2, 4), ("T", 2, 1)]),
    (CopyAttrs("concat", axis=1), [("T", 2, 3), ("T", 1, 3)]),
    (CopyAttrs("concat", axis=0), [(2, 3), (4, 3)]),
    (CopyAttrs("broadcast", shape=("T", 4, 6)), [("T", 1, 6)]),
    (CopyAttrs("broadcast", shape=("T", 6)), [(6,)]),
    (CopyAttrs("broadcast", shape=("T",)), [()]),
]


@pytest.mark.parametrize(("attrs", "shapes"), COPIES, ids=[f"{a.kind}{s}" for a, s in COPIES])
@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_copy(attrs: CopyAttrs, shapes: list[Shape], dtype: str) -> None:
    step = plain_step(3)
    types = [TensorType(dtype, shape) for shape in shapes]
    inputs = [random(shape, 3, dtype, seed) for seed, shape in enumerate(shapes)]
    check(COPY, attrs, types, inputs, step, environment(step), rtol=0, atol=0)


def test_a_copy_with_five_axes_or_tokens_behind_is_refused() -> None:
    step = plain_step(3)
    five = TensorType("f32", ("T", 1, 2, 3, 4))
    with pytest.raises(UnsupportedError, match="at most 4 axes"):
        launches(COPY, CopyAttrs("slice", axis=1, start=0, stop=1), [five], environment(step))
    with pytest.raises(UnsupportedError, match="symbolic axis"):
        launches(COPY, CopyAttrs("transpose", perm=(1, 0)), [TensorType("f32", ("T", 3))], environment(step))


def test_all_reduce_copies_and_sums() -> None:
    step = plain_step(3)
    types = [TensorType("f32", ("T", 40))]
    assert launches(ALL_REDUCE, AllReduceAttrs(), types, environment(step))[-1] == Collective(0)
    check(ALL_REDUCE, AllReduceAttrs(), types, [random(("T", 40), 3)], step, environment(step), rtol=0, atol=0)
