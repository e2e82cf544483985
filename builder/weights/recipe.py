"""Weights as data: small frozen expressions over the checkpoint's tensors, with text, parser, types and evaluation.

Comes in: recipe text such as `concat(0, load('q.weight'), slice(load('k.weight'), 0, 0, 64))`, a `Source` of tensors.
Goes out: the parsed `Recipe`, its text, its type. Must not know: graphs, passes, kernels.

A leaf is float32, whatever the checkpoint stores, unless it is `stored`: a dtype changes only where a recipe says so.

    load('name')                a tensor of the checkpoint, as float32
    stored('name', 'f8e4m3')    a tensor as it is stored, which must be in that dtype: rounded weights and their scales
    buffer('name')              a constant that the traced model computed for itself (inverse frequencies, ...)
    slice(r, axis, start, stop) concat(axis, r, ...)  transpose(r)  add(r, 1.0)  mul(r, 0.5)  cast(r, 'bf16')
    times(r, v)                 each entry of r's last axis times its own of the vector v, in float32
    every(r, axis, start, step) entries start, start + step, ... of an axis
    stack(r, ...)               recipes of one shape, joined along a new first axis
    reshape(r, n, ...)          the same values in another shape
    swap(r, a, b)               axes a and b exchanged; transpose(r) is swap(r, 0, 1) of a matrix
    matrices(r, n)              [E * n, K] as [E, n, K]
    runs(r, start, count, width, stride)  `count` runs of `width` rows, whose first rows lie `stride` apart
    fp8(r, s)                   r / s by row, to E4M3 (round to nearest even, saturated at 448)
    fp8_scale(r)                f32[N]: the largest magnitude of each row / 448; 1 where that is no float above zero
    int8(r, s)                  i8: r / s by row (round to nearest even, saturated at 127)
    int8_scale(r)               f32[N]: the largest magnitude of each row / 127; 1 where that is no float above zero
    int4(r, s, z)               u4[N,K]: r / s by group of 128 columns, plus z (round to nearest even, 0..15)
    int4_scale(r)               f16[N,G]: the range of each group and 0, / 15
    int4_zero(r)                u4[N,G]: what stands for 0 in each group
    pad(r, axis, n)             zeros behind, until the axis has n entries
    panels(r, width)            the layout that linear kernels read, see `pack_panels`
    panels_gated(r, width)      the same for gate rows followed by as many up rows: half a panel gate, half a panel up
    nibbles(r)                  u8[..,K/2] of u4[..,K]: two in a byte, the even column low, a zero behind an odd K

A weight of rank 3 is a stack of matrices [E, N, K], one an expert or a head: its scales are f32[E, N], its
panels those of each.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RecipeError(ValueError):
    """A recipe that cannot be read, or whose types do not fit."""


class Source(Protocol):
    """Where leaves come from: a `Checkpoint`, tensors stored beside it, the traced model's buffers."""

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Rows start:stop (axis 0) of a checkpoint tensor, in any float dtype."""

    def stored(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Rows start:stop (axis 0) of a tensor that a `stored` leaf names, in the dtype that it is stored in."""

    def buffer(self, name: str) -> np.ndarray:
        """A constant of the traced model."""


@dataclass(frozen=True)
class Recipe:
    """The base. `str(recipe)` is text that `parse` reads back."""

    def __str__(self) -> str:
        name = _NAMES[type(self)]
        parts: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            parts += [str(v) for v in value] if isinstance(value, tuple) else [_text(value)]
        return f"{name}({', '.join(parts)})"


@dataclass(frozen=True)
class Load(Recipe):
    """A tensor of the checkpoint, by its Hugging Face parameter name."""

    name: str


@dataclass(frozen=True)
class StoredTensor(Recipe):
    """A tensor that is taken as it is: its bytes are those of `dtype`, and no rounding of this build."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Buffer(Recipe):
    """A constant of the traced model, by its buffer name."""

    name: str


@dataclass(frozen=True)
class Slice(Recipe):
    """Entries start:stop of one axis (not negative)."""

    source: Recipe
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Every(Recipe):
    """Entries start, start + step, start + 2 * step, ... of one axis (not negative)."""

    source: Recipe
    axis: int
    start: int
    step: int


@dataclass(frozen=True)
class Runs(Recipe):
    """`count` runs of `width` rows (axis 0), the first from row `start` on, each `stride` rows behind the last one's
    start: the query rows of a projection that holds query, key and value rows of one head after another.
    """

    source: Recipe
    start: int
    count: int
    width: int
    stride: int


@dataclass(frozen=True)
class Concat(Recipe):
    """Several recipes joined along one axis."""

    axis: int
    sources: tuple[Recipe, ...]


@dataclass(frozen=True)
class Stack(Recipe):
    """Several recipes of one shape along a new first axis: the matrices of experts that are stored one by one."""

    sources: tuple[Recipe, ...]


@dataclass(frozen=True)
class Reshape(Recipe):
    """The values of source, in order, in another shape."""

    source: Recipe
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Transpose(Recipe):
    """A matrix with its two axes exchanged."""

    source: Recipe


@dataclass(frozen=True)
class Swap(Recipe):
    """Axes `a` and `b` exchanged."""

    source: Recipe
    a: int
    b: int


@dataclass(frozen=True)
class Matrices(Recipe):
    """[E * rows, ...] as a stack of things of that many rows: [E, rows, ...]."""

    source: Recipe
    rows: int


@dataclass(frozen=True)
class Add(Recipe):
    """source + constant, in float32."""

    source: Recipe
    constant: float


@dataclass(frozen=True)
class Mul(Recipe):
    """source * constant, in float32."""

    source: Recipe
    constant: float


@dataclass(frozen=True)
class Times(Recipe):
    """source[..., k] * factors[k], in float32."""

    source: Recipe
    factors: Recipe


@dataclass(frozen=True)
class Cast(Recipe):
    """Another dtype, rounded to nearest even."""

    source: Recipe
    dtype: str


@dataclass(frozen=True)
class Fp8(Recipe):
    """E4M3 of source[..., n, :] / scale[..., n]."""

    source: Recipe
    scale: Recipe


@dataclass(frozen=True)
class Fp8Scale(Recipe):
    """The scale of each row of a matrix, f32[N], or of each of a stack, f32[E, N]."""

    source: Recipe


@dataclass(frozen=True)
class Int8(Recipe):
    """INT8 of source[..., n, :] / scale[..., n]."""

    source: Recipe
    scale: Recipe


@dataclass(frozen=True)
class Int8Scale(Recipe):
    """The scale of each row of a matrix, f32[N], or of each of a stack, f32[E, N]."""

    source: Recipe


@dataclass(frozen=True)
class Int4(Recipe):
    """The 4-bit numbers of a matrix or a stack of them: each group's scale and zero point are those of a column of
    `scale` and `zero`.
    """

    source: Recipe
    scale: Recipe
    zero: Recipe


@dataclass(frozen=True)
class Int4Scale(Recipe):
    """The scale of each group of a matrix's rows, f16[N,G], or of a stack's, f16[E,N,G]."""

    source: Recipe


@dataclass(frozen=True)
class Int4Zero(Recipe):
    """The zero point of each group of a matrix's rows, u4[N,G], or of a stack's, u4[E,N,G]."""

    source: Recipe


@dataclass(frozen=True)
class Pad(Recipe):
    """Zeros behind an axis until it has `size` entries."""

    source: Recipe
    axis: int
    size: int


@dataclass(frozen=True)
class Panels(Recipe):
    """[N, K] -> [panels, K, width], [E, N, K] -> [E, panels, K, width], [N] -> [panels, width]: see `pack_panels`."""

    source: Recipe
    width: int


@dataclass(frozen=True)
class PanelsGated(Recipe):
    """The same for rows gate|up: each panel holds width/2 gate rows, then the width/2 up rows that belong to them."""

    source: Recipe
    width: int


@dataclass(frozen=True)
class Nibbles(Recipe):
    """u4[.., K] -> u8[.., K / 2]: two numbers of a row in a byte, the even column low; a zero behind an odd K."""

    source: Recipe


Leaf = Load | StoredTensor | Buffer

_CLASSES: dict[str, type[Recipe]] = {
    "load": Load,
    "stored": StoredTensor,
    "buffer": Buffer,
    "slice": Slice,
    "every": Every,
    "runs": Runs,
    "concat": Concat,
    "stack": Stack,
    "reshape": Reshape,
    "transpose": Transpose,
    "swap": Swap,
    "matrices": Matrices,
    "add": Add,
    "mul": Mul,
    "times": Times,
    "cast": Cast,
    "fp8": Fp8,
    "fp8_scale": Fp8Scale,
    "int8": Int8,
    "int8_scale": Int8Scale,
    "int4": Int4,
    "int4_scale": Int4Scale,
    "int4_zero": Int4Zero,
    "pad": Pad,
    "panels": Panels,
    "panels_gated": PanelsGated,
    "nibbles": Nibbles,
}
#: Field annotation -> what its value (each of them, in a tuple) must be.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "Recipe": Recipe,
    "tuple[Recipe, ...]": Recipe,
    "tuple[int, ...]": int,
    "int": int,
    "str": str,
    "float": (int, float),
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def _text(value: object) -> str:
    return str(value) if isinstance(value, Recipe) else repr(value)


def parse(text: str) -> Recipe:
    """The recipe that `str(recipe)` printed; raises RecipeError with the text."""
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise RecipeError(f"cannot read the recipe {text!r}: {error}") from error


def _build(tree: ast.expr) -> Recipe:
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.keywords:
        raise RecipeError("a recipe is a call such as load('name')")
    cls = _CLASSES.get(tree.func.id)
    if cls is None:
        raise RecipeError(f"{tree.func.id} is not one of {', '.join(_CLASSES)}")
    args = [_build(a) if isinstance(a, ast.Call) else ast.literal_eval(a) for a in tree.args]
    if str(dataclasses.fields(cls)[-1].type).startswith("tuple"):
        single = len(dataclasses.fields(cls)) - 1
        args = [*args[:single], tuple(args[single:])]
    recipe = cls(*args)
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(isinstance(v, _FIELDS[str(field.type)]) for v in values):
            raise RecipeError(f"{tree.func.id}: {field.name} is {value!r}, not {field.type}")
    return recipe


def children(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes that this one is made of, in order."""
    found: list[Recipe] = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        found += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Recipe)]
    return tuple(found)


def leaves(recipe: Recipe) -> Iterator[Leaf]:
    """Every tensor that the recipe reads, repeated where it is read twice."""
    if isinstance(recipe, Leaf):
        yield recipe
    for child in children(recipe):
        yield from leaves(child)
