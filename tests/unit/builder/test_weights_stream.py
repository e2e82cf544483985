"""Streaming gives the bytes that evaluating each recipe whole gives, reads only the rows it needs, and refuses NaN."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.errors import CheckpointError
from llmc.artifacts.types import FP8_MAX, NUMPY_DTYPES, TensorType
from llmc.builder.weights.errors import ErrorMeter
from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.fp8 import quantize_fp8
from llmc.builder.weights.pack import pack_panels
from llmc.builder.weights.placement import ALIGN, Stored, place, stored_form
from llmc.builder.weights.recipe import Leaf, parse
from llmc.builder.weights.stream import BLOCK, KEPT, rows, write_weights

F8 = NUMPY_DTYPES["f8e4m3"]


class Tensors:
    """A source in memory that counts what is read."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shapes = {"a": (200, 48), "b": (130, 48), "c": (200, 48), "v": (200,), "t": (48, 200), "one": (),
                  "e": (5, 24, 20), "w": (130, 300)}  # fmt: skip
        self.values = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
        self.values["a"][7] = 0
        self.values["q"] = quantize_fp8(self.values["b"], 0.25)
        self.values["n"] = rng.integers(0, 16, (130, 300)).astype(NUMPY_DTYPES["u4"])
        self.elements = 0

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return self.values[leaf.name].shape

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        value = self.values[name]
        part = value[start:stop] if value.ndim else value
        self.elements += part.size
        return part

    stored = read

    def buffer(self, name: str) -> np.ndarray:
        return self.values[name]


RECIPES = [
    "load('a')",
    "load('one')",
    "buffer('v')",
    "cast(load('a'), 'bf16')",
    "add(mul(load('v'), 0.5), 1.0)",
    "transpose(load('t'))",
    "slice(slice(load('a'), 1, 8, 40), 0, 3, 170)",
    "runs(load('a'), 4, 9, 7, 21)",
    "panels(fp8(runs(load('b'), 2, 5, 16, 24), fp8_scale(runs(load('b'), 2, 5, 16, 24))), 64)",
    "concat(0, load('a'), slice(load('b'), 0, 1, 129), load('c'))",
    "concat(1, load('a'), load('c'))",
    "fp8(load('a'), fp8_scale(load('a')))",
    "fp8(slice(load('a'), 1, 0, 16), fp8_scale(load('a')))",
    "fp8_scale(concat(0, load('a'), load('b')))",
    "int4(load('w'), int4_scale(load('w')), int4_zero(load('w')))",
    "panels(slice(int4(load('w'), int4_scale(load('w')), int4_zero(load('w'))), 1, 0, 200), 64)",
    "panels(int4_scale(concat(0, load('w'), slice(load('w'), 0, 3, 70))), 64)",
    "panels_gated(int4_zero(slice(load('w'), 0, 2, 130)), 64)",
    "panels(slice(stored('n', 'u4'), 1, 200, 300), 64)",
    "nibbles(slice(stored('n', 'u4'), 1, 200, 299))",
    "nibbles(int4_zero(slice(load('w'), 0, 2, 130)))",
    "panels(concat(0, stored('q', 'f8e4m3'), slice(stored('q', 'f8e4m3'), 0, 3, 90)), 64)",
    "slice(stored('q', 'f8e4m3'), 1, 8, 40)",
    "panels_gated(slice(stored('q', 'f8e4m3'), 0, 2, 130), 64)",
    "pad(load('b'), 0, 140)",
    "panels(load('b'), 64)",
    "panels(cast(load('a'), 'bf16'), 64)",
    "panels(fp8(load('b'), fp8_scale(load('b'))), 64)",
    "panels(cast(transpose(load('t')), 'bf16'), 64)",
    "panels_gated(concat(0, load('a'), load('c')), 64)",
    "panels(cast(load('e'), 'bf16'), 64)",
    "panels(reshape(load('a'), 5, 40, 48), 64)",
    "panels(fp8(swap(load('e'), 1, 2), fp8_scale(swap(load('e'), 1, 2))), 64)",
    "panels_gated(concat(1, every(load('e'), 1, 0, 2), every(load('e'), 1, 1, 2)), 64)",
    "panels(slice(fp8(load('e'), fp8_scale(load('e'))), 2, 8, 20), 64)",
    "fp8_scale(slice(load('e'), 1, 3, 20))",
    "panels_gated(fp8(concat(0, load('a'), load('c')), fp8_scale(concat(0, load('a'), load('c')))), 64)",
]


@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.parametrize("block", [1, 64 * 48 * 4, 1 << 24])
def test_blocks_give_the_same_bytes_as_the_whole(text: str, block: int) -> None:
    source, sink = Tensors(), io.BytesIO()
    kind = infer(parse(text), source.shape)
    (member,), _ = place([[Stored("load('one')", TensorType("f32", ()), ""), Stored(text, kind, "")]])
    write_weights(member, source, sink, block=block)
    whole = np.ascontiguousarray(evaluate(parse(text), source)).reshape(-1).view(np.uint8).tobytes()
    offset = member.placements[-1].offset
    assert len(sink.getvalue()) == member.nbytes
    assert sink.getvalue()[offset : offset + len(whole)] == whole


@given(st.sampled_from([r for r in RECIPES if r not in ("load('one')",)]), st.data())
@settings(max_examples=60, deadline=None)
def test_rows_are_a_slice(text: str, data: st.DataObject) -> None:
    source, recipe = Tensors(), parse(text)
    count = int(infer(recipe, source.shape).shape[0])
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    part = evaluate(rows(recipe, start, stop, source), source)
    assert part.tobytes() == np.ascontiguousarray(evaluate(recipe, source)[start:stop]).tobytes()


def test_only_the_rows_that_are_needed_are_read_and_each_once() -> None:
    source = Tensors()
    text = "panels(fp8(slice(load('a'), 0, 64, 128), fp8_scale(slice(load('a'), 0, 64, 128))), 64)"
    stored = [Stored(text, TensorType("f8e4m3", (1, 48, 64)), "")]
    stored.append(Stored("fp8_scale(slice(load('a'), 0, 64, 128))", TensorType("f32", (64,)), ""))
    (member,), _ = place([stored])
    write_weights(member, source, io.BytesIO())
    assert source.elements == 64 * 48


def test_a_stored_byte_that_is_no_number_is_refused_by_name() -> None:
    source = Tensors()
    source.values["q"].view(np.uint8)[5, 6] = 0xFF
    (member,), _ = place([[Stored("stored('q', 'f8e4m3')", TensorType("f8e4m3", (130, 48)), "")]])
    with pytest.raises(CheckpointError, match="tensor 'q' holds NaN or infinity"):
        write_weights(member, source, io.BytesIO())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(bad: float) -> None:
    source = Tensors()
    source.values["b"][3, 4] = bad
    (member,), _ = place([[Stored("cast(load('b'), 'bf16')", TensorType("bf16", (130, 48)), "")]])
    with pytest.raises(CheckpointError, match="tensor 'b' holds NaN or infinity"):
        write_weights(member, source, io.BytesIO())


def test_what_all_ranks_store_alike_is_placed_once() -> None:
    def stored(name: str, size: int) -> Stored:
        return Stored(f"load('{name}')", TensorType("f32", (size,)), name)

    members, shared = place([[stored("x", 3), stored("both", 5), stored("x", 3)], [stored("both", 5), stored("y", 40)]])
    assert [[p.recipe for p in m.placements] for m in members] == [["load('x')"], ["load('y')"]]
    assert [p.recipe for p in shared.placements] == ["load('both')"]
    assert [m.nbytes for m in (*members, shared)] == [ALIGN, 3 * ALIGN, ALIGN]


def test_one_rank_shares_nothing() -> None:
    (member,), shared = place([[Stored("load('a')", TensorType("f32", (1,)), "")]])
    assert (len(member.placements), shared.nbytes) == (1, 0)


def test_packing_changes_recipe_and_type() -> None:
    found = stored_form("load('w')", TensorType("f8e4m3", (100, 7)), "panels({}, 64)", "m")
    assert found == Stored("panels(load('w'), 64)", TensorType("f8e4m3", (2, 7, 64)), "m")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_rounding_is_numpys_cast_for_any_float(values: list[float]) -> None:
    x = np.array(values, np.float32)
    want = np.clip(x, -FP8_MAX, FP8_MAX).astype(F8)
    assert quantize_fp8(x, 1.0).tobytes() == want.tobytes()


def test_rounding_is_right_at_every_number_and_every_border_between_two() -> None:
    exact = np.arange(256, dtype=np.uint8).view(F8).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] + exact[:-1]) / 2
    near = np.concatenate([np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]).astype(np.float32)
    for x in (exact, middle, near, -exact * 3):
        want = np.clip(x / np.float32(3), -FP8_MAX, FP8_MAX).astype(F8)
        assert quantize_fp8(x, np.full(len(x), 3.0)).tobytes() == want.tobytes()
        assert quantize_fp8(x, 1.0).tobytes() == np.clip(x, -FP8_MAX, FP8_MAX).astype(F8).tobytes()


@pytest.mark.parametrize("count", [64, 100, 1])
def test_panels_hold_outputs_side_by_side(count: int) -> None:
    value = np.arange(count * 3, dtype=np.float32).reshape(count, 3) + 1
    packed = pack_panels(value, 64)
    for n in range(len(packed) * 64):
        want = value[n] if n < count else np.zeros(3)
        np.testing.assert_array_equal(packed[n // 64, :, n % 64], want)


def test_gated_panels_pair_each_gate_with_its_up() -> None:
    value = np.arange(80, dtype=np.float32).reshape(80, 1) + 1
    packed = pack_panels(value, 64, gated=True)
    assert packed.shape == (2, 1, 64)
    np.testing.assert_array_equal(packed[0, 0], np.concatenate([np.arange(1, 33), np.arange(41, 73)]))
    np.testing.assert_array_equal(packed[1, 0, :8], np.arange(33, 41))
    np.testing.assert_array_equal(packed[1, 0, 32:40], np.arange(73, 81))
    assert not packed[1, 0, 8:32].any()
    assert not packed[1, 0, 40:].any()


def test_fp8_bytes_stand_in_the_decoders_order() -> None:
    codes = np.arange(64, dtype=np.uint8)
    packed = pack_panels(codes.view(F8)[:, None], 64).view(np.uint8)[0, 0]
    for group in range(2):
        for i in range(8):
            for j in range(4):
                assert packed[32 * group + 4 * i + j] == codes[32 * group + 8 * j + i]


class Endless:
    """A tensor of 400 MB as float32, made as it is read."""

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return (100_000, 1000)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        first, last, _ = slice(start, stop).indices(100_000)
        return np.full((last - first, 1000), 0.5, np.float32)

    def stored(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        raise KeyError(name)

    def buffer(self, name: str) -> np.ndarray:
        raise KeyError(name)


class Nowhere:
    """A sink that only counts."""

    size = 0

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)


def test_memory_stays_at_a_few_blocks_whatever_the_tensor() -> None:
    text = "panels(fp8(load('w'), fp8_scale(load('w'))), 64)"
    kind = infer(parse(text), Endless().shape)
    (member,), _ = place([[Stored(text, kind, "")]])
    sink = Nowhere()
    tracemalloc.start()
    write_weights(member, Endless(), sink)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sink.size == member.nbytes > 100_000_000
    assert peak < KEPT + 6 * BLOCK < 400_000_000


def test_a_stack_is_packed_an_expert_at_a_time() -> None:
    source, most = Tensors(), 0
    read = source.read

    def counting(name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        nonlocal most
        most = max(most, 5 if start is None or stop is None else stop - start)
        return read(name, start, stop)

    source.read = counting  # type: ignore[method-assign]
    text = "panels_gated(concat(1, every(swap(load('e'), 1, 2), 1, 0, 2), every(swap(load('e'), 1, 2), 1, 1, 2)), 64)"
    (member,), _ = place([[Stored(text, infer(parse(text), source.shape), "")]])
    write_weights(member, source, io.BytesIO(), block=1)
    assert most == 1


def test_errors_are_those_of_the_whole_tensors_however_they_are_cut() -> None:
    source = Tensors()
    recipes = [
        "panels(concat(0, fp8(load('a'), fp8_scale(load('a'))), fp8(load('b'), fp8_scale(load('b')))), 64)",
        "cast(load('c'), 'bf16')",
        "load('v')",
    ]
    forms = [Stored(recipe, infer(parse(recipe), source.shape), "m") for recipe in recipes]
    ((member,), _) = place([forms])
    meters = ErrorMeter(), ErrorMeter()
    for meter, block in zip(meters, (1 << 20, 64 * 48 * 4), strict=True):
        write_weights(member, source, io.BytesIO(), block=block, meter=meter)
    errors = meters[0].errors()
    assert errors == meters[1].errors()
    assert set(errors) == {"a", "b", "c"}, "what is not rounded has no error to tell"
    exact = source.values["a"]
    scale = evaluate(parse("fp8_scale(load('a'))"), source)[:, None]
    off = quantize_fp8(exact, scale).astype(np.float32) * scale - exact
    assert errors["a"] == pytest.approx(np.sqrt(np.square(off).sum() / np.square(exact).sum()), rel=5e-3)
    assert 1e-3 < errors["c"] < 2.5e-3  # bf16 keeps 8 bits
