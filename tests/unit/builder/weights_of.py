"""Recipes evaluated over a Hugging Face model in memory: what tests give the interpreter as `params`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from llmc.builder.weights.recipe import evaluate, parse


class ModelSource:
    """The model's tensors by name and a traced graph's buffers."""

    def __init__(self, model: Any, buffers: Mapping[str, np.ndarray]) -> None:
        self.tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
        self.buffers = buffers

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        return self.tensors[name][start:stop]

    def buffer(self, name: str) -> np.ndarray:
        return self.buffers[name]


def params_of(model: Any, buffers: Mapping[str, np.ndarray]) -> Callable[[str], np.ndarray]:
    """Recipe text -> value, each evaluated once."""
    source = ModelSource(model, buffers)
    return cache(lambda recipe: evaluate(parse(recipe), source))
