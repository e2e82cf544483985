"""The norms of the cuda targets against their references, interpreted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import TensorType
from llmc.plugins.rms_norm import OPERATOR as RMS
from llmc.plugins.rms_norm import Attrs as RmsAttrs
from tests.unit.cuda.harness import check, environment, plain_step

dtypes = st.sampled_from(["f32", "bf16"])


@given(
    tokens=st.integers(1, 5), width=st.integers(1, 300), residual=st.booleans(), x=dtypes, y=dtypes,
    seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_rms_norm(tokens: int, width: int, residual: bool, x: str, y: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vector = TensorType("f32", ("T", width)), TensorType("f32", (width,))
    types = [rows, vector, *[rows] * residual]
    inputs = [
        rng.standard_normal((tokens, width)) * 3,
        rng.standard_normal(width),
        rng.standard_normal((tokens, width)),
    ]
    step = plain_step(tokens)
    env = environment(step, stored={("in", 0): x, ("out", residual): y})
    check(RMS, RmsAttrs(1e-5, residual), types, [v.astype(np.float32) for v in inputs[: len(types)]], step, env)


def test_rms_norm_of_heads() -> None:
    rng = np.random.default_rng(0)
    step = plain_step(3)
    types = [TensorType("f32", ("T", 5, 24)), TensorType("f32", (24,))]
    inputs = [rng.standard_normal((3, 5, 24)).astype(np.float32), rng.standard_normal(24).astype(np.float32)]
    check(RMS, RmsAttrs(1e-6), types, inputs, step, environment(step))
