"""Weights of tensors that are FP8 already: bytes times scales are what the recipe gives of their numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.kept import keep
from llmc.builder.weights.recipe import StoredTensor, parse
from tests.unit.builder.weights_of import Tensors

NAMES = "abcd"
SCALES = {name: f"{name}_scale" for name in NAMES}
STORED = {name: (StoredTensor(name, "f8e4m3"), StoredTensor(scale, "f32")) for name, scale in SCALES.items()}


@pytest.fixture(scope="module")
def stored() -> Tensors:
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(6, 8)).astype(ml_dtypes.float8_e4m3fn) for name in NAMES}
    return Tensors(tensors | {scale: rng.random(6, np.float32) for scale in SCALES.values()}, {})


@pytest.fixture(scope="module")
def plain(stored: Tensors) -> Tensors:
    values = {n: stored.read(n).astype(np.float32) * stored.read(SCALES[n])[:, None] for n in NAMES}
    return Tensors(values | {"e": np.ones((6, 8), np.float32)}, {})


@pytest.mark.parametrize(
    "text",
    [
        "load('a')",
        "concat(0, load('a'), slice(load('b'), 0, 2, 5))",
        "slice(load('a'), 1, 3, 7)",
        "every(load('a'), 0, 1, 2)",
        "every(load('a'), 1, 1, 2)",
        "runs(load('a'), 1, 2, 1, 3)",
        "matrices(load('a'), 3)",
        "concat(1, stack(load('a'), load('b')), stack(load('c'), load('d')))",
        "slice(concat(1, stack(load('a'), load('b')), stack(load('c'), load('d'))), 2, 1, 5)",
        "every(stack(load('a'), load('b')), 1, 1, 2)",
        "swap(stack(load('a'), load('b')), 0, 1)",
    ],
)
def test_bytes_times_scales_are_the_weight(stored: Tensors, plain: Tensors, text: str) -> None:
    recipe = parse(text)
    kept = keep(recipe, STORED)
    assert kept is not None
    weight, scale = evaluate(kept.weight, stored), evaluate(kept.others[0], stored)
    assert weight.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(weight.astype(np.float32) * scale[..., None], evaluate(recipe, plain))
    assert weight.ndim == kept.rank
    assert infer(kept.others[0], stored.shape).shape == scale.shape == weight.shape[:-1]


@pytest.mark.parametrize(
    "text",
    [
        "load('e')",  # not in FP8
        "stack(load('a'), load('e'))",
        "transpose(load('a'))",
        "swap(stack(load('a'), load('b')), 1, 2)",
        "concat(1, load('a'), load('b'))",  # a row of two scales
        "concat(2, stack(load('a')), stack(load('b')))",
        "mul(load('a'), 2.0)",
    ],
)
def test_what_scales_cannot_follow_is_not_kept(text: str) -> None:
    assert keep(parse(text), STORED) is None
