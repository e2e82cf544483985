"""Comparisons and choices: the references against PyTorch, and what the type rules refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.primitives import PRIMITIVES
from llmc.builder.primitives.logic import COMPARISONS, LOGICAL
from llmc.plugins.operator import StepContext

CONTEXT = StepContext(4, np.array([0, 5]), np.array([5]), np.zeros((1, 2), np.int32))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 2, 6)).astype(np.float32)
INDEX = np.array([[RNG.permutation(6)[:3] for _ in range(2)] for _ in range(5)], np.int32)


def apply(op: str, *arrays: np.ndarray, **attrs: Any) -> np.ndarray:
    """The reference's result, whose type must be what the rule says."""
    operator = PRIMITIVES[op]
    values = operator.attrs(**attrs)
    (out,) = operator.reference(CONTEXT, values, arrays)
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    kinds = [TensorType(names[a.dtype], a.shape) for a in (*arrays, out)]
    assert operator.infer(values, kinds[:-1]) == (kinds[-1],)
    return out


@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons(op: str) -> None:
    y = np.where(X > 0, X, 0.5).astype(np.float32)
    np.testing.assert_array_equal(apply(op, X, y), getattr(torch, op)(torch.tensor(X), torch.tensor(y)).numpy())


@pytest.mark.parametrize("op", [*LOGICAL, "logical_not"])
def test_logic(op: str) -> None:
    given = [X > 0] if op == "logical_not" else [X > 0, X[:, :1] > 0.3]
    np.testing.assert_array_equal(apply(op, *given), getattr(torch, op)(*map(torch.tensor, given)).numpy())


def test_where_broadcasts() -> None:
    low = np.float32(-np.inf).reshape(())
    wanted = torch.where(torch.tensor(X > 0), torch.tensor(X), torch.tensor(low)).numpy()
    np.testing.assert_array_equal(apply("where", X > 0, X, np.asarray(low)), wanted)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_and_gather(largest: bool) -> None:
    values, places = torch.topk(torch.tensor(X), 4, dim=-1, largest=largest)
    index = apply("topk", X, k=4, largest=largest)
    np.testing.assert_array_equal(index, places.numpy())
    np.testing.assert_array_equal(apply("gather", X, index), values.numpy())


def test_scatter() -> None:
    source = RNG.standard_normal(INDEX.shape).astype(np.float32)
    place = torch.tensor(INDEX, dtype=torch.int64)
    wanted = torch.tensor(X).scatter(-1, place, torch.tensor(source)).numpy()
    np.testing.assert_array_equal(apply("scatter", X, INDEX, source), wanted)
    wanted = torch.tensor(X).scatter(-1, place, 7.0).numpy()
    np.testing.assert_array_equal(apply("scatter", X, INDEX, np.float32(7).reshape(())), wanted)


@pytest.mark.parametrize(
    ("op", "types", "attrs"),
    [
        ("gt", ["f32[T,4]", "i32[T,4]"], {}),
        ("logical_and", ["f32[T,4]", "f32[T,4]"], {}),
        ("logical_not", ["f32[T,4]"], {}),
        ("where", ["f32[T,4]", "f32[T,4]", "f32[T,4]"], {}),
        ("where", ["bool[T,4]", "f32[T,4]", "i32[T,4]"], {}),
        ("topk", ["f32[T,4]"], {"k": 5}),
        ("topk", ["f32[4,T]"], {"k": 1}),
        ("gather", ["f32[T,4]", "f32[T,2]"], {}),
        ("gather", ["f32[T,2,4]", "i32[T,2]"], {}),
        ("scatter", ["f32[T,4]", "i32[T,2]", "f32[T,3]"], {}),
        ("scatter", ["f32[T,4]", "i32[T,2]", "i32[]"], {}),
    ],
)
def test_refuses(op: str, types: list[str], attrs: dict[str, Any]) -> None:
    operator = PRIMITIVES[op]
    with pytest.raises(ValueError, match=r"\w"):
        operator.infer(operator.attrs(**attrs), [TensorType.parse(t) for t in types])
