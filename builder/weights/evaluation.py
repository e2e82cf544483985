"""What a recipe amounts to: its type without reading anything, and its value as a numpy array.

Comes in: a `Recipe`, shapes of its leaves or a `Source`. Goes out: `TensorType`, arrays. Must not know: graphs, passes,
how values are streamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from llmc.artifacts.types import FP8_MAX, INT4_GROUP, NUMPY_DTYPES, TensorType
from llmc.builder.weights.fp8 import quantize_fp8
from llmc.builder.weights.int4 import int4_scale, int4_zero, quantize_int4
from llmc.builder.weights.int8 import int8_scale, quantize_int8
from llmc.builder.weights.pack import pack_nibbles, pack_panels
from llmc.builder.weights.recipe import (
    Add,
    Buffer,
    Cast,
    Concat,
    Every,
    Fp8,
    Fp8Scale,
    Int4,
    Int4Scale,
    Int4Zero,
    Int8,
    Int8Scale,
    Leaf,
    Load,
    Matrices,
    Mul,
    Nibbles,
    Pad,
    Panels,
    PanelsGated,
    Recipe,
    RecipeError,
    Reshape,
    Runs,
    Slice,
    Source,
    Stack,
    StoredTensor,
    Swap,
    Times,
    Transpose,
    children,
)


def _fail(recipe: Recipe, reason: str) -> RecipeError:
    return RecipeError(f"{recipe}: {reason}")


def infer(recipe: Recipe, leaf: Callable[[Leaf], tuple[int, ...]]) -> TensorType:
    """The type of a recipe's value. `leaf` gives a leaf's shape; raises RecipeError where the shapes do not fit."""
    if isinstance(recipe, Leaf):
        return TensorType(recipe.dtype if isinstance(recipe, StoredTensor) else "f32", tuple(leaf(recipe)))
    types = [infer(child, leaf) for child in children(recipe)]
    source = types[0]
    shape = [int(d) for d in source.shape]
    match recipe:
        case Slice(_, axis, start, stop):
            if not 0 <= axis < len(shape) or not 0 <= start < stop <= shape[axis]:
                raise _fail(recipe, f"axis {axis} of {source} has no entries {start}:{stop}")
            shape[axis] = stop - start
        case Every(_, axis, start, step):
            if not 0 <= axis < len(shape) or not 0 <= start < shape[axis] or step < 1:
                raise _fail(recipe, f"axis {axis} of {source} has no entries {start}, {start + step}, ...")
            shape[axis] = -(-(shape[axis] - start) // step)
        case Swap(_, a, b):
            if not all(0 <= axis < len(shape) for axis in (a, b)):
                raise _fail(recipe, f"{source} has no axes {a} and {b}")
            shape[a], shape[b] = shape[b], shape[a]
        case Matrices(_, rows):
            if rows < 1 or shape[0] % rows:
                raise _fail(recipe, f"{source} is no stack of things of {rows} rows")
            shape = [shape[0] // rows, rows, *shape[1:]]
        case Runs(_, start, count, width, stride):
            if start < 0 or not 0 < width <= stride or count < 1 or start + (count - 1) * stride + width > shape[0]:
                raise _fail(recipe, f"{source} has no such rows")
            shape[0] = count * width
        case Concat(axis, _):
            for other in types[1:]:
                if other.dtype != source.dtype or _without(other.shape, axis) != _without(source.shape, axis):
                    raise _fail(recipe, f"{other} does not join {source} on axis {axis}")
            shape[axis] = sum(int(t.shape[axis]) for t in types)
        case Stack():
            if odd := [t for t in types if t != source]:
                raise _fail(recipe, f"{odd[0]} does not stack on {source}")
            shape.insert(0, len(types))
        case Reshape(_, wanted):
            if math.prod(wanted) != math.prod(shape):
                raise _fail(recipe, f"{source} does not fill the shape")
            shape = list(wanted)
        case Transpose():
            if len(shape) != 2:
                raise _fail(recipe, f"{source} is not a matrix")
            shape.reverse()
        case Cast(_, dtype):
            return TensorType(dtype, source.shape)
        case Times():
            if types[1] != TensorType("f32", source.shape[-1:]):
                raise _fail(
                    recipe, f"the factors are {types[1]}, not one f32 for each entry of the last axis of {source}"
                )
        case Fp8() | Int8():
            if types[1] != TensorType("f32", source.shape[:-1]):
                raise _fail(recipe, f"the scale is {types[1]}, not one f32 for each row of {source}")
            return TensorType("f8e4m3" if isinstance(recipe, Fp8) else "i8", source.shape)
        case Fp8Scale() | Int8Scale():
            return TensorType("f32", source.shape[:-1])
        case Int4():
            by_group = (*shape[:-1], -(-shape[-1] // INT4_GROUP))
            if types[1:] != [TensorType(dtype, by_group) for dtype in ("f16", "u4")]:
                raise _fail(recipe, f"scale and zero points are {types[1]} and {types[2]}, not by group of {source}")
            return TensorType("u4", source.shape)
        case Int4Scale() | Int4Zero():
            dtype = "f16" if isinstance(recipe, Int4Scale) else "u4"
            return TensorType(dtype, (*shape[:-1], -(-shape[-1] // INT4_GROUP)))
        case Pad(_, axis, size):
            if size < shape[axis]:
                raise _fail(recipe, f"axis {axis} of {source} is longer than {size}")
            shape[axis] = size
        case Panels(_, width):
            return _panels(source, width)
        case PanelsGated(_, width):
            if shape[len(shape) == 3] % 2 or width % 2:
                raise _fail(recipe, f"{source} has no two equal halves of rows")
            return _panels(source, width)
        case Nibbles():
            if source.dtype != "u4":
                raise _fail(recipe, f"{source} is not of 4-bit numbers")
            return TensorType("u8", (*shape[:-1], -(-shape[-1] // 2)))
    return TensorType(source.dtype, tuple(shape))


def _panels(source: TensorType, width: int) -> TensorType:
    """[N, ...] -> [panels, ..., width], or the same behind the first axis of a stack; 4-bit numbers two in a byte,
    and two k of INT8 together."""
    shape = [int(d) for d in source.shape]
    *stack, rows = shape[: 1 + (len(shape) == 3)]
    before, inner = (*stack, -(-rows // width)), shape[len(stack) + 1 :]
    if source.dtype == "u4":
        return TensorType("u8", (*before, *inner, width // 2))
    if source.dtype == "i8" and len(inner) == 1:
        return TensorType("i8", (*before, -(-inner[0] // 2), 2 * width))
    return TensorType(source.dtype, (*before, *inner, width))


def _without(shape: tuple[int | str, ...], axis: int) -> tuple[int | str, ...]:
    return shape[:axis] + shape[axis + 1 :]


def evaluate(recipe: Recipe, source: Source) -> np.ndarray:
    """The recipe's value, all of it in memory. Row slices of tensors read only those rows."""
    match recipe:
        case Load() | StoredTensor() | Buffer():
            return read_leaf(recipe, source)
        case Slice(Load() | StoredTensor() as leaf, 0, start, stop):
            return read_leaf(leaf, source, start, stop)
    return apply(recipe, [evaluate(child, source) for child in children(recipe)])


def read_leaf(leaf: Leaf, source: Source, start: int | None = None, stop: int | None = None) -> np.ndarray:
    """A leaf's value, or rows start:stop of it (of a buffer always all). Raises RecipeError for a stored tensor in
    another dtype than the recipe says.
    """
    match leaf:
        case Load(name):
            return np.asarray(source.read(name, start, stop)).astype(np.float32)
        case Buffer(name):
            return np.asarray(source.buffer(name)).astype(np.float32)
        case StoredTensor(name, dtype):
            value = np.asarray(source.stored(name, start, stop))
            if value.dtype != NUMPY_DTYPES[dtype]:
                raise _fail(leaf, f"{name!r} is stored as {value.dtype}")
            return value


def apply(recipe: Recipe, values: list[np.ndarray]) -> np.ndarray:
    """One step of a recipe that is not a leaf, given its children's values."""
    value = values[0]
    match recipe:
        case Slice(_, axis, start, stop):
            return value[(slice(None),) * axis + (slice(start, stop),)]
        case Every(_, axis, start, step):
            return value[(slice(None),) * axis + (slice(start, None, step),)]
        case Swap(_, a, b):
            return value.swapaxes(a, b)
        case Matrices(_, height):
            return value.reshape(-1, height, *value.shape[1:])
        case Runs(_, start, count, width, stride):
            first = start + stride * np.arange(count)
            return value[(first[:, None] + np.arange(width)).reshape(-1)]
        case Concat(axis, _):
            return np.concatenate(values, axis)
        case Stack():
            return np.stack(values)
        case Reshape(_, shape):
            return value.reshape(shape)
        case Transpose():
            return value.T
        case Add(_, constant):
            return value + np.float32(constant)
        case Mul(_, constant):
            return value * np.float32(constant)
        case Times():
            return value * values[1]
        case Cast(_, dtype):
            return value.astype(NUMPY_DTYPES[dtype])
        case Fp8():
            rows = np.ascontiguousarray(value).reshape(-1, value.shape[-1])
            return quantize_fp8(rows, values[1].reshape(-1, 1)).reshape(value.shape)
        case Fp8Scale():
            scale = np.abs(value).max(axis=-1) / np.float32(FP8_MAX)
            return np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
        case Int8():
            return quantize_int8(value, values[1])
        case Int8Scale():
            return int8_scale(value)
        case Int4():
            return quantize_int4(value, values[1], values[2])
        case Int4Scale():
            return int4_scale(value)
        case Int4Zero():
            return int4_zero(value)
        case Pad(_, axis, size):
            return _pad(value, axis, size)
        case Panels(_, width):
            return pack_panels(value, width)
        case PanelsGated(_, width):
            return pack_panels(value, width, gated=True)
        case Nibbles():
            return pack_nibbles(value)
    raise _fail(recipe, "is a leaf and has no step")


def _pad(value: np.ndarray, axis: int, size: int) -> np.ndarray:
    widths = [(0, 0)] * value.ndim
    widths[axis] = (0, size - value.shape[axis])
    return np.pad(value, widths) if size != value.shape[axis] else value
