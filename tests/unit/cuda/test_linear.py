"""linear on the cuda targets against its reference, interpreted: every format, ragged and odd sizes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cuda.call import Collective, CudaEnv
from llmc.plugins.linear import EPILOGUES, OPERATOR, Attrs, groups, quantize_x
from llmc.profiles.targets import load_target
from tests.unit.cuda.backend import architecture
from tests.unit.cuda.harness import check, environment, launches, plain_step

FORMATS = ["f32", "bf16", "f8e4m3", "f8e4m3 x", "i8", "u4"]


def operands(attrs: Attrs, kind: str, tokens: int, depth: int, size: int, seed: int):
    """Types and arrays; x is of numbers that bf16 has, so that no rounding of the kernel's shows."""
    rng = np.random.default_rng(seed)
    dtype = kind.split()[0]
    w = rng.standard_normal((size, depth))
    x = rng.standard_normal((tokens, depth)).astype(ml_dtypes.bfloat16).astype(np.float32)
    types = [TensorType("f32", ("T", depth)), TensorType(dtype, (size, depth))]
    arrays = [
        x,
        np.clip(np.rint(40 * w), -127, 127).astype(np.int8) if dtype == "i8" else w.astype(NUMPY_DTYPES[dtype]),
    ]
    if dtype == "u4":
        shape = (size, groups(depth, attrs.group_start))
        arrays[1] = rng.integers(0, 16, (size, depth)).astype(ml_dtypes.uint4)
        types += [TensorType("f16", shape), TensorType("u4", shape)]
        arrays += [rng.uniform(0.01, 0.2, shape).astype(np.float16), rng.integers(0, 16, shape).astype(ml_dtypes.uint4)]
    if dtype in ("f8e4m3", "i8"):
        types.append(TensorType("f32", (size,)))
        arrays.append(rng.uniform(0.01, 0.1, size).astype(np.float32))
    if attrs.x_factors:
        types.append(TensorType("f32", (depth,)))
        arrays.append(rng.uniform(0.5, 2, depth).astype(np.float32))
    if attrs.bias:
        types.append(TensorType("f32", (size,)))
        arrays.append(rng.standard_normal(size).astype(np.float32))
    if kind == "f8e4m3 x":
        arrays[0], scale = quantize_x(x, None)
        types[0] = TensorType("f8e4m3", ("T", depth))
        types.append(TensorType("f32", ("T", 1)))
        arrays.append(scale)
    return types, arrays


def tactics(**more: int) -> dict[str, dict[str, int]]:
    """Those of the target, with some numbers changed."""
    own = load_target(f"cuda:sm_{architecture()}").tactics["linear"]
    return {name: {**numbers, **more} for name, numbers in own.items()}


def env_of(tokens: int, decode: bool, **more) -> CudaEnv:
    """Small tiles, so that small matrices have several."""
    small = tactics(rows=16, columns=32, depth_bytes=64)
    return environment(plain_step(tokens), decode, **{"tactics": small, **more})


@given(
    kind=st.sampled_from(FORMATS), tokens=st.integers(1, 20), depth=st.integers(1, 150), size=st.integers(1, 40),
    bias=st.booleans(), epilogue=st.sampled_from(EPILOGUES), decode=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_a_product(kind, tokens, depth, size, bias, epilogue, decode, seed) -> None:
    size *= 2 if epilogue.endswith("_gate") else 1
    attrs = Attrs(bias=bias, epilogue=epilogue, x_per_token=kind == "i8")
    types, arrays = operands(attrs, kind, tokens, depth, size, seed)
    check(OPERATOR, attrs, types, arrays, plain_step(tokens), env_of(tokens, decode), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_values_lie_as_lowering_says(stored: str, out: str) -> None:
    types, arrays = operands(Attrs(), "bf16", 5, 72, 40, 0)
    env = env_of(5, True, stored={("in", 0): stored, ("out", 0): out})
    check(OPERATOR, Attrs(), types, arrays, plain_step(5), env, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", [0, 2, 5, 127])
@pytest.mark.parametrize("epilogue", ["none", "silu_gate"])
def test_groups_begin_where_the_shard_does(start: int, epilogue: str) -> None:
    attrs = Attrs(epilogue=epilogue, group_start=start)
    types, arrays = operands(attrs, "u4", 3, 193, 6, start)
    check(OPERATOR, attrs, types, arrays, plain_step(3), env_of(3, True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x_scale", [None, 0.02])
@pytest.mark.parametrize("factors", [False, True])
def test_int8_rounds_as_the_reference(x_scale: float | None, factors: bool) -> None:
    attrs = Attrs(x_scale=x_scale, x_per_token=x_scale is None, x_factors=factors)
    types, arrays = operands(attrs, "i8", 6, 90, 24, 3)
    arrays[0][1] = 0
    arrays[0][2, 7], arrays[0][3, 4], arrays[0][4, 0] = np.nan, np.inf, 1e30
    check(OPERATOR, attrs, types, arrays, plain_step(6), env_of(6, False), rtol=1e-6, atol=0)


def test_the_bias_of_a_sum_is_one_ranks() -> None:
    attrs = Attrs(bias=True, all_reduce=True)
    types, arrays = operands(attrs, "f8e4m3 x", 4, 64, 20, 1)
    env = env_of(4, True, tp=2)
    check(OPERATOR, attrs, types, arrays, plain_step(4), env, rtol=1e-4, atol=1e-4)
    first, last = (launches(OPERATOR, attrs, types, replace(env, rank=rank)) for rank in (0, 1))
    assert [first[1], last[1]] == [Collective(0)] * 2
    assert "bias" in first[0].args
    assert last[0].constexprs["bias"] is None


def test_a_rows_result_depends_on_no_other_row() -> None:
    types, arrays = operands(Attrs(), "bf16", 33, 130, 70, 2)
    env = env_of(33, False)
    (whole,) = check(OPERATOR, Attrs(), types, arrays, plain_step(33), env, rtol=1e-4, atol=1e-4)
    (part,) = check(OPERATOR, Attrs(), types, [arrays[0][:7], arrays[1]], plain_step(7), env, rtol=1e-4, atol=1e-4)
    assert np.array_equal(whole[:7], part)


def test_what_is_rounded_on_the_way_is_an_operator_of_its_own() -> None:
    attrs = Attrs(x_per_token=True)
    types, _ = operands(attrs, "f8e4m3", 1, 64, 16, 0)
    with pytest.raises(ValueError, match="split_quantize"):
        launches(OPERATOR, attrs, types, env_of(1, True))
