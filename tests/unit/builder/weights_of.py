"""A model's tensors in memory as the source of recipes: for the interpreter's `params` and for `write_weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.recipe import Buffer, Leaf, parse


class Tensors:
    """Tensors by name and a traced graph's buffers."""

    def __init__(self, tensors: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray]) -> None:
        self.tensors, self.buffers = tensors, buffers

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return (self.buffers if isinstance(leaf, Buffer) else self.tensors)[leaf.name].shape

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        value = self.tensors[name]
        return value[start:stop] if value.ndim else value

    stored = read

    def buffer(self, name: str) -> np.ndarray:
        return self.buffers[name]


def model_tensors(model: Any, buffers: Mapping[str, np.ndarray]) -> Tensors:
    """Those of a torch model."""
    return Tensors({name: value.detach().numpy() for name, value in model.state_dict().items()}, buffers)


def params_of(tensors: Tensors) -> Callable[[str], np.ndarray]:
    """Recipe text -> value, each evaluated once."""
    return cache(lambda recipe: evaluate(parse(recipe), tensors))
