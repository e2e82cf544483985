"""The norms of the cuda targets against their references, interpreted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import TensorType
from llmc.plugins.layer_norm import OPERATOR as LAYER
from llmc.plugins.layer_norm import Attrs as LayerAttrs
from llmc.plugins.rms_norm import OPERATOR as RMS
from llmc.plugins.rms_norm import Attrs as RmsAttrs
from tests.unit.cuda.harness import check, environment, execute, ordered, plain_step

dtypes = st.sampled_from(["f32", "bf16"])


@pytest.mark.parametrize("name", ["rms", "layer"])
@given(
    tokens=st.integers(1, 5), width=st.integers(1, 300), residual=st.booleans(), x=dtypes, y=dtypes,
    seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_norms(name: str, tokens: int, width: int, residual: bool, x: str, y: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vector = TensorType("f32", ("T", width)), TensorType("f32", (width,))
    vectors = 1 if name == "rms" else 2
    types = [rows, *[vector] * vectors, *[rows] * residual]
    inputs = [(rng.standard_normal([tokens if d == "T" else d for d in t.shape]) * 3).astype(np.float32) for t in types]
    step = plain_step(tokens)
    env = environment(step, stored={("in", 0): x, ("out", residual): y})
    if name == "rms":
        check(RMS, RmsAttrs(1e-5, residual), types, inputs, step, env)
    else:
        check(LAYER, LayerAttrs(1e-5, residual), types, inputs, step, env, atol=1e-4)


def test_rms_norm_of_heads() -> None:
    rng = np.random.default_rng(0)
    step = plain_step(3)
    types = [TensorType("f32", ("T", 5, 24)), TensorType("f32", (24,))]
    inputs = [rng.standard_normal((3, 5, 24)).astype(np.float32), rng.standard_normal(24).astype(np.float32)]
    check(RMS, RmsAttrs(1e-6), types, inputs, step, environment(step))


@pytest.mark.parametrize("how", ["token", 0.02])
@pytest.mark.parametrize("name", ["rms", "layer"])
def test_rounded_norms(name: str, how: str | float) -> None:
    """E4M3 numbers with their scales; a number between two may fall on either side, and hardly any does."""
    rng = np.random.default_rng(2)
    tokens, width = 4, 200
    types = [TensorType("f32", ("T", width)), *[TensorType("f32", (width,))] * (1 if name == "rms" else 2)]
    inputs = [rng.standard_normal([tokens if d == "T" else d for d in t.shape]).astype(np.float32) for t in types]
    inputs[0][1] = 0
    if name == "layer":
        inputs[2][:] = 0
    operator, attrs = (RMS, RmsAttrs(1e-5, quantize=how)) if name == "rms" else (LAYER, LayerAttrs(1e-5, quantize=how))
    step = plain_step(tokens)
    numbers, scales = execute(operator, attrs, types, inputs, step, environment(step))
    want, want_scales = operator.reference(step.context, attrs, inputs)
    np.testing.assert_allclose(scales, want_scales, rtol=1e-6)
    apart = np.abs(ordered(numbers) - ordered(want))
    assert apart.max() <= 1
    assert (apart != 0).mean() < 0.01
