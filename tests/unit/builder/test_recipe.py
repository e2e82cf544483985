"""Recipes: text and back, types, values, and slices that move to the leaves."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from llmc.artifacts.types import FP8_MAX, NUMPY_DTYPES
from llmc.builder.weights.cut import picked, sliced
from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.pack import pack_nibbles
from llmc.builder.weights.recipe import (
    Buffer,
    Cast,
    Concat,
    Fp8,
    Fp8Scale,
    Load,
    Mul,
    Recipe,
    RecipeError,
    Runs,
    Slice,
    StoredTensor,
    Transpose,
    parse,
)

RNG = np.random.default_rng(0)
TENSORS = {
    "w": RNG.standard_normal((80, 24)).astype(np.float32),
    "v": RNG.standard_normal((16, 24)).astype(ml_dtypes.bfloat16),
    "it's": RNG.standard_normal(80).astype(np.float32),
    "experts": RNG.standard_normal((3, 20, 24)).astype(np.float32),
    "q": RNG.standard_normal((80, 24)).astype(ml_dtypes.float8_e4m3fn),
}


class Tensors:
    """A source that remembers which rows were read."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int | None, int | None]] = []

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        self.reads.append((name, start, stop))
        return TENSORS[name][start:stop]

    stored = read

    def buffer(self, name: str) -> np.ndarray:
        return np.arange(4, dtype=np.float32)


TEXTS = [
    "load('w')",
    'load("it\'s")',
    "stored('q', 'f8e4m3')",
    "panels(concat(0, stored('q', 'f8e4m3'), stored('q', 'f8e4m3')), 64)",
    "buffer('model.rotary_emb.inv_freq')",
    "slice(load('w'), 0, 8, 24)",
    "runs(load('w'), 8, 3, 4, 20)",
    "concat(0, load('w'), load('v'))",
    "transpose(load('w'))",
    "every(load('w'), 0, 1, 2)",
    "swap(load('experts'), 1, 2)",
    "fp8(load('experts'), fp8_scale(load('experts')))",
    "panels(load('experts'), 64)",
    "panels_gated(concat(1, every(load('experts'), 1, 0, 2), every(load('experts'), 1, 1, 2)), 64)",
    "add(load('w'), 1.0)",
    "mul(load('w'), 0.125)",
    "cast(load('w'), 'bf16')",
    "fp8(load('w'), fp8_scale(load('w')))",
    "pad(load('v'), 0, 64)",
    "panels(fp8(load('w'), fp8_scale(load('w'))), 64)",
    "panels_gated(concat(0, load('w'), load('w')), 64)",
    'panels(load("it\'s"), 64)',
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_type_and_value_agree(text: str) -> None:
    recipe = parse(text)
    assert str(recipe) == text
    value = evaluate(recipe, Tensors())
    kind = infer(recipe, lambda leaf: (4,) if isinstance(leaf, Buffer) else TENSORS[leaf.name].shape)
    assert kind.shape == value.shape
    assert (kind.dtype == "f32") == (value.dtype == np.float32)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lode('w')", "lode is not one of"),
        ("load(w)", "cannot read"),
        ("load(3)", "name is 3"),
        ("load('w'", "cannot read"),
        ("slice(load('w'), 0, 'a', 3)", "start is 'a'"),
        ("__import__('os')", "is not one of"),
        ("concat(0, load('w'), 3)", "cannot read"),
    ],
)
def test_bad_text_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason.replace("(", r"\(")):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "slice(load('w'), 0, 70, 90)",
        "concat(1, load('w'), load('v'))",
        "fp8(load('w'), fp8_scale(load('v')))",
        "pad(load('w'), 0, 8)",
        'transpose(load("it\'s"))',
        "slice(load('w'), 0, 3, 3)",
        "every(load('w'), 0, 80, 2)",
        "swap(load('w'), 0, 2)",
        "panels_gated(slice(load('experts'), 1, 0, 3), 64)",
        "runs(load('w'), 8, 4, 4, 24)",
        "runs(load('w'), 0, 4, 6, 4)",
    ],
)
def test_types_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        infer(parse(text), lambda leaf: TENSORS[leaf.name].shape)


def _fp8(source: Recipe) -> Fp8:
    return Fp8(source, Fp8Scale(source))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "recipe",
    [
        Load("w"),
        Cast(Load("w"), "bf16"),
        Mul(Load("w"), 3.0),
        Transpose(Load("w")),
        _fp8(Load("w")),
        Slice(Load("w"), 0, 4, 70),
        Concat(0, (Load("w"), Load("v"))),
        StoredTensor("q", "f8e4m3"),
        Runs(Load("w"), 3, 4, 5, 19),
        _fp8(Transpose(Load("w"))),
    ],
)
def test_slices_keep_values_wherever_they_move(recipe: Recipe, axis: int) -> None:
    whole = evaluate(recipe, Tensors())
    part = evaluate(sliced(recipe, axis, 5, 17), Tensors())
    np.testing.assert_array_equal(part, whole[5:17] if axis == 0 else whole[:, 5:17])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("text", ["load('experts')", "swap(load('experts'), 1, 2)", "cast(load('experts'), 'bf16')"])
@pytest.mark.parametrize("quantized", [False, True])
def test_slices_of_stacks_keep_values(text: str, axis: int, quantized: bool) -> None:
    recipe = _fp8(parse(text)) if quantized else parse(text)
    whole = evaluate(recipe, Tensors())
    part = evaluate(sliced(recipe, axis, 1, 3, rank=3), Tensors())
    np.testing.assert_array_equal(part, whole[(slice(None),) * axis + (slice(1, 3),)])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (range(8, 24), "slice(load('w'), 0, 8, 24)"),
        ([*range(4, 8), *range(24, 28), *range(44, 48)], "runs(load('w'), 4, 3, 4, 20)"),
        (range(1, 80, 2), "runs(load('w'), 1, 40, 1, 2)"),
        ([40, 41, 2, 3], "concat(0, slice(load('w'), 0, 40, 42), slice(load('w'), 0, 2, 4))"),
    ],
)
def test_rows_are_picked_in_the_shortest_way(rows: Sequence[int], text: str) -> None:
    assert str(picked(Load("w"), rows)) == text
    np.testing.assert_array_equal(evaluate(picked(Load("w"), rows), Tensors()), TENSORS["w"][list(rows)])
    np.testing.assert_array_equal(
        evaluate(picked(_fp8(Load("w")), rows), Tensors()), evaluate(_fp8(Load("w")), Tensors())[list(rows)]
    )


def test_runs_are_cut_at_their_borders_without_reading_more() -> None:
    runs = Runs(Load("w"), 4, 3, 4, 20)
    assert str(sliced(runs, 0, 4, 12)) == "runs(load('w'), 24, 2, 4, 20)"
    assert str(sliced(runs, 0, 4, 8)) == "slice(load('w'), 0, 24, 28)"


def test_row_slices_read_only_their_rows() -> None:
    source = Tensors()
    evaluate(sliced(Cast(Slice(Load("w"), 0, 10, 60), "bf16"), 0, 5, 9), source)
    evaluate(sliced(StoredTensor("q", "f8e4m3"), 0, 5, 9), source)
    assert source.reads == [("w", 15, 19), ("q", 5, 9)]


def test_a_stored_tensor_of_another_dtype_is_refused() -> None:
    with pytest.raises(RecipeError, match="'w' is stored as float32"):
        evaluate(StoredTensor("w", "f8e4m3"), Tensors())


def test_fp8_is_close_saturates_and_survives_zero_rows() -> None:
    weights = TENSORS["w"].copy()
    weights[3] = 0
    source = Tensors()
    source.read = lambda name, start=None, stop=None: weights[start:stop]  # type: ignore[method-assign]
    scale = evaluate(Fp8Scale(Load("w")), source)
    quantized = evaluate(_fp8(Load("w")), source).astype(np.float32)
    assert scale[3] == 1
    np.testing.assert_allclose(np.abs(quantized).max(axis=1)[scale != 1], FP8_MAX)
    np.testing.assert_allclose(quantized * scale[:, None], weights, rtol=1 / 16, atol=2**-9 * scale.max())


@pytest.mark.parametrize("largest", [0.0, 1e-45, 5e-43, 1e-38])
def test_a_row_of_next_to_nothing_gets_a_scale_above_zero(largest: float) -> None:
    source = Tensors()
    source.read = lambda name, start=None, stop=None: np.array([[largest, 0]], np.float32)  # type: ignore[method-assign]
    scale, quantized = evaluate(Fp8Scale(Load("w")), source), evaluate(_fp8(Load("w")), source).astype(np.float32)
    assert scale[0] > 0
    assert np.isfinite(quantized).all()


def test_panels_hold_outputs_side_by_side() -> None:
    packed = evaluate(parse("panels(load('w'), 64)"), Tensors())
    assert packed.shape == (2, 24, 64)
    assert packed[1, 7, 3] == TENSORS["w"][67, 7]
    assert not packed[1, :, 16:].any()


def test_fp8_panels_are_shuffled_for_the_decoder() -> None:
    text = "fp8(load('w'), fp8_scale(load('w')))"
    rows, packed = evaluate(parse(text), Tensors()), evaluate(parse(f"panels({text}, 64)"), Tensors())
    for i in range(8):
        for j in range(4):
            assert packed[0, 5, 32 + 4 * i + j] == rows[32 + 8 * j + i, 5]


def test_gated_panels_keep_gate_and_up_together() -> None:
    packed = evaluate(parse("panels_gated(load('w'), 64)"), Tensors())  # 40 gate rows, 40 up rows
    assert packed.shape == (2, 24, 64)
    assert packed[0, 2, 31] == TENSORS["w"][31, 2]
    assert packed[0, 2, 32] == TENSORS["w"][40, 2]
    assert packed[1, 2, 7] == TENSORS["w"][39, 2]
    assert packed[1, 2, 39] == TENSORS["w"][79, 2]
    assert not packed[1, :, 8:32].any()


def test_nibbles_lie_two_in_a_byte_the_even_column_low() -> None:
    numbers = np.array([[1, 2, 3], [15, 0, 9]], np.uint8).astype(NUMPY_DTYPES["u4"])
    assert pack_nibbles(numbers).tolist() == [[0x21, 0x03], [0x0F, 0x09]]
