"""grouped_linear on the cuda targets against its reference, interpreted."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cuda.call import Collective
from llmc.plugins.grouped_linear import OPERATOR, Attrs
from llmc.plugins.linear import groups, quantize_x
from tests.unit.cuda.harness import Step, check, environment, execute, launches, plain_step
from tests.unit.cuda.test_linear import tactics

EXPERTS, SLOTS = 5, 2


def operands(attrs: Attrs, kind: str, tokens: int, depth: int, size: int, seed: int, one_row: bool = True):
    """Types and arrays; x is of numbers that bf16 has. A token's experts differ; some experts have no rows."""
    rng = np.random.default_rng(seed)
    dtype = kind.split()[0]
    shape = (tokens, depth) if one_row else (tokens, SLOTS, depth)
    x = rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    index = np.array([rng.permutation(EXPERTS - 1)[:SLOTS] for _ in range(tokens)], np.int32).reshape(tokens, SLOTS)
    w = rng.standard_normal((EXPERTS, size, depth)).astype(NUMPY_DTYPES["f32" if dtype == "u4" else dtype])
    types = [TensorType("f32", ("T", *shape[1:])), TensorType("i32", ("T", SLOTS)), TensorType(dtype, w.shape)]
    arrays = [x, index, w]
    if dtype == "u4":
        by_group = (EXPERTS, size, groups(depth, attrs.group_start))
        arrays[2] = rng.integers(0, 16, w.shape).astype(ml_dtypes.uint4)
        types += [TensorType("f16", by_group), TensorType("u4", by_group)]
        arrays.append(rng.uniform(0.01, 0.2, by_group).astype(np.float16))
        arrays.append(rng.integers(0, 16, by_group).astype(ml_dtypes.uint4))
    vectors = [rng.uniform(0.01, 0.1, (EXPERTS, size))] * (dtype == "f8e4m3")
    vectors += [rng.standard_normal((EXPERTS, size))] * attrs.bias
    types += [TensorType("f32", (EXPERTS, size))] * len(vectors)
    if attrs.combine:
        types.append(TensorType("f32", ("T", SLOTS)))
        vectors.append(rng.uniform(0, 1, (tokens, SLOTS)))
    arrays += [vector.astype(np.float32) for vector in vectors]
    if kind == "f8e4m3 x":
        numbers, scale = quantize_x(x.reshape(-1, depth), None)
        arrays[0] = numbers.reshape(shape)
        arrays.append(scale.reshape(*shape[:-1], 1))
        types[0] = TensorType("f8e4m3", types[0].shape)
        types.append(TensorType("f32", (*types[0].shape[:-1], 1)))
    return types, arrays


def env_of(step: Step, decode: bool, **more):
    return environment(step, decode, tactics=tactics(rows=16, columns=32, depth_bytes=64), **more)


@given(
    kind=st.sampled_from(["f32", "bf16", "f8e4m3", "f8e4m3 x", "u4"]), tokens=st.integers(1, 30),
    depth=st.integers(1, 140), size=st.integers(1, 20), bias=st.booleans(), one_row=st.booleans(),
    after=st.sampled_from(["none", "formula", "gated", "combine"]), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_products_of_experts(kind, tokens, depth, size, bias, one_row, after, seed) -> None:
    expr = {"formula": "mul(i0, 0.5)", "gated": "mul(silu(i0), i1)"}.get(after, "i0")
    attrs = Attrs(bias=bias, gated=after == "gated", expr=expr, combine=after == "combine")
    size *= 2 if after == "gated" else 1
    types, arrays = operands(attrs, kind, tokens, depth, size, seed, one_row)
    step = plain_step(tokens)
    check(OPERATOR, attrs, types, arrays, step, env_of(step, False), rtol=1e-4, atol=1e-4)


def test_many_rows_of_one_expert() -> None:
    """Lists of several tiles, and of several blocks of `route`."""
    attrs = Attrs(combine=True)
    types, arrays = operands(attrs, "bf16", 700, 8, 4, 0)
    arrays[1][50:] = (3, 1)
    step = plain_step(700)
    check(OPERATOR, attrs, types, arrays, step, env_of(step, False), rtol=1e-4, atol=1e-4)


def test_padded_rows_are_of_no_expert() -> None:
    attrs = Attrs(combine=True, all_reduce=True)
    types, arrays = operands(attrs, "bf16", 3, 40, 6, 1)
    (expected,) = OPERATOR.reference(plain_step(3).context, attrs, arrays)
    step = Step(plain_step(3).context, padded=2)
    env = env_of(step, True)
    arrays[0], arrays[3] = (np.concatenate([a, np.full((2, *a.shape[1:]), np.nan, a.dtype)]) for a in arrays[::3])
    arrays[1] = np.concatenate([arrays[1], [[-7, 2**30], [EXPERTS, -(2**31)]]]).astype(np.int32)
    (found,) = execute(OPERATOR, attrs, types, arrays, step, env)
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
    assert launches(OPERATOR, attrs, types, env)[-1] == Collective(0)


def test_int8_is_refused_with_a_remedy() -> None:
    types, _ = operands(Attrs(x_per_token=True), "f8e4m3", 1, 8, 8, 0)
    types[2] = dataclasses.replace(types[2], dtype="i8")
    with pytest.raises(UnsupportedError, match="INT8 weights of experts are for cpu targets alone; build with --fp8"):
        launches(OPERATOR, Attrs(x_per_token=True), types, env_of(plain_step(1), True))


def test_what_is_rounded_on_the_way_is_an_operator_of_its_own() -> None:
    types, _ = operands(Attrs(x_per_token=True), "f8e4m3", 1, 8, 8, 0)
    with pytest.raises(ValueError, match="split_quantize"):
        launches(OPERATOR, Attrs(x_per_token=True), types, env_of(plain_step(1), True))
