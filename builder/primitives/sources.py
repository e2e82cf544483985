"""Where values start: the step's inputs, the weights, and constants. The interpreter fills them in.

Comes in: nothing. Goes out: `OPERATORS`. Must not know: how a recipe is executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext


@dataclass(frozen=True)
class InputAttrs:
    """`name` is one of the step's arrays: ids i32[T], positions i32[T], rows i32[S]."""

    name: str


@dataclass(frozen=True)
class ParamAttrs:
    """`recipe` is text as `builder/weights/recipe.py` reads it: how the value is made from the checkpoint."""

    recipe: str


@dataclass(frozen=True)
class ConstAttrs:
    """`values` are the elements in row-major order; the node's type says dtype and shape."""

    values: tuple[float, ...]


def _declared(attrs: Any, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """No rule: the node itself declares its type."""
    if types:
        raise ValueError(f"takes no inputs, has {len(types)}")
    return ()


def _outside(context: StepContext, attrs: Any, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    raise TypeError(f"{attrs} has no value of its own: the interpreter supplies it")


OPERATORS = (
    Operator("input", InputAttrs, _declared, _outside),
    Operator("param", ParamAttrs, _declared, _outside),
    Operator("const", ConstAttrs, _declared, _outside),
)
