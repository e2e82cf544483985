"""quantize, embedding and head_linear on the cuda targets against their references, interpreted."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins import embedding, head_linear, quantize
from tests.unit.cuda.harness import Step, check, environment, execute, plain_step
from tests.unit.cuda.test_linear import tactics


@given(
    tokens=st.integers(1, 5), width=st.integers(1, 300), scale=st.sampled_from([None, 0.01]), deep=st.booleans(),
    stored=st.sampled_from(["f32", "bf16"]), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_quantize(tokens: int, width: int, scale: float | None, deep: bool, stored: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (tokens, 3, width) if deep else (tokens, width)
    x = (rng.standard_normal(shape) * rng.uniform(0.01, 100)).astype(np.float32)
    x[0] = 0
    step = plain_step(tokens)
    env = environment(step, stored={("in", 0): stored})
    check(quantize.OPERATOR, quantize.Attrs(scale), [TensorType("f32", ("T", *shape[1:]))], [x], step, env, 0, 0)


def test_a_number_that_is_none_stays_none() -> None:
    x = np.ones((2, 40), np.float32)
    x[1, 7] = np.nan
    step = plain_step(2)
    types = [TensorType("f32", ("T", 40))]
    numbers, _ = execute(quantize.OPERATOR, quantize.Attrs(0.5), types, [x], step, environment(step))
    assert np.isnan(numbers.astype(np.float32)).sum() == 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_embedding(dtype: str) -> None:
    table = np.random.default_rng(0).standard_normal((7, 33)).astype(NUMPY_DTYPES[dtype])
    step = plain_step(4)
    types = [TensorType("i32", ("T",)), TensorType(dtype, (7, 33))]
    ids = np.array([6, 0, 3, 3], np.int32)
    check(embedding.OPERATOR, embedding.Attrs(), types, [ids, table], step, environment(step), 0, 0)


def test_padded_rows_name_no_row_of_the_table() -> None:
    step = Step(plain_step(1).context, padded=2)
    types = [TensorType("i32", ("T",)), TensorType("bf16", (7, 33))]
    table, ids = np.ones((7, 33), ml_dtypes.bfloat16), np.array([1, -5, 2**30], np.int32)
    env = environment(step, decode=True)
    (found,) = execute(embedding.OPERATOR, embedding.Attrs(), types, [ids, table], step, env)
    assert np.array_equal(found, np.ones((1, 33)))


@given(
    tokens=st.integers(1, 20), heads=st.integers(1, 3), depth=st.integers(1, 70), size=st.integers(1, 40),
    around=st.integers(0, 5), dtype=st.sampled_from(["f32", "bf16"]), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_head_linear(tokens, heads, depth, size, around, dtype, seed) -> None:
    rng = np.random.default_rng(seed)
    wide = heads * (depth + 2 * around)
    types = [TensorType("f32", ("T", wide)), TensorType(dtype, (heads, size, depth))]
    x = rng.standard_normal((tokens, wide)).astype(ml_dtypes.bfloat16).astype(np.float32)
    w = rng.standard_normal((heads, size, depth)).astype(NUMPY_DTYPES[dtype])
    step = plain_step(tokens)
    env = environment(step, tactics=tactics(rows=16, columns=32, depth_bytes=64))
    check(head_linear.OPERATOR, head_linear.Attrs(around), types, [x, w], step, env, 1e-4, 1e-4)
