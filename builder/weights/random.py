"""Random weights for a graph that has no checkpoint: a part of a model, or an invented one.

Comes in: graphs. Goes out: a source of tensors whose shapes follow from the graphs' parameters. Must not know: passes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from llmc.artifacts.errors import UsageError
from llmc.artifacts.types import INT4_MAX, INT8_MAX, NUMPY_DTYPES
from llmc.builder.ir import Graph
from llmc.builder.weights.recipe import (
    Add,
    Buffer,
    Cast,
    Concat,
    Fp8,
    Int4,
    Int8,
    Leaf,
    Load,
    Matrices,
    Mul,
    Recipe,
    Runs,
    Slice,
    StoredTensor,
    Swap,
    Times,
    Transpose,
    children,
    leaves,
    parse,
)


class RandomWeights:
    """Each tensor is drawn by its name alone; rows are scaled by their length, so that products keep their size. One
    that is read in slices is as long as the last slice reaches.

    Raises UsageError for a tensor that occurs only in what is joined already, so that its shape is not known.
    """

    def __init__(self, graphs: Iterable[Graph]) -> None:
        self._shapes: dict[Recipe, tuple[int, ...]] = {}
        recipes = [(parse(n.attrs.recipe), n.type.shape) for graph in graphs for n in graph if n.op == "param"]
        for recipe, shape in recipes:
            self._learn(recipe, tuple(int(d) for d in shape))
        for leaf in (leaf for recipe, _ in recipes for leaf in leaves(recipe)):
            if leaf not in self._shapes:
                raise UsageError(f"{leaf}: its shape cannot be told from this graph; give the checkpoint with --model")

    def _learn(self, recipe: Recipe, shape: tuple[int, ...]) -> None:
        match recipe:
            case Load() | StoredTensor() | Buffer():
                known = self._shapes.get(recipe, shape)
                self._shapes[recipe] = tuple(map(max, known, shape))
            case Slice(source, axis, _, stop):
                self._learn(source, (*shape[:axis], stop, *shape[axis + 1 :]))
            case Transpose(source):
                self._learn(source, shape[::-1])
            case Swap(source, a, b):
                turned = list(shape)
                turned[a], turned[b] = shape[b], shape[a]
                self._learn(source, tuple(turned))
            case Matrices(source, rows):
                self._learn(source, (shape[0] * rows, *shape[2:]))
            case Runs(source, start, count, width, stride):
                self._learn(source, (start + (count - 1) * stride + width, *shape[1:]))
            case Concat(axis, sources):
                for source in sources:
                    self._learn(source, (*shape[:axis], shape[axis] // len(sources), *shape[axis + 1 :]))
            case Times(source, factors):
                self._learn(source, shape)
                self._learn(factors, shape[-1:])
            case Cast() | Add() | Mul() | Fp8() | Int8() | Int4():
                self._learn(children(recipe)[0], shape)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf."""
        return self._shapes[leaf]

    def stored(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """A tensor that is rounded already, or rows start:stop of it."""
        leaf = next(leaf for leaf in self._shapes if isinstance(leaf, StoredTensor) and leaf.name == name)
        value = self._draw(leaf)
        if leaf.dtype == "u4":  # numbers of all sizes, most in the middle
            value = np.clip(8 + 3 * value * value.shape[-1] ** 0.5, 0, INT4_MAX).astype(np.uint8)
        if leaf.dtype == "i8":
            value = np.clip(40 * value * value.shape[-1] ** 0.5, -INT8_MAX, INT8_MAX)
        return value.astype(NUMPY_DTYPES[leaf.dtype])[start:stop]

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """A tensor, or rows start:stop of it, f32."""
        value = self._draw(Load(name))
        return value[start:stop] if value.ndim else value

    def buffer(self, name: str) -> np.ndarray:
        """A constant of the traced model, f32."""
        return self._draw(Buffer(name))

    def _draw(self, leaf: Leaf) -> np.ndarray:
        shape = self._shapes[leaf]
        rng = np.random.default_rng(zlib.crc32(str(leaf).encode()))
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return (rng.standard_normal(shape) * scale).astype(np.float32)
