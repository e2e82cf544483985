"""pointwise of the cuda targets against its reference, interpreted: every function, and every way to broadcast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.types import TensorType
from llmc.plugins.pointwise import OPERATOR, Attrs
from llmc.plugins.pointwise.functions import ARITY
from tests.unit.cuda.harness import as_stored, environment, execute, plain_step

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    88.0,
    -88.0,
    1e-3,
    -1e-3,
    1e-30,
    1e30,
    np.inf,
    -np.inf,
    np.nan,
]


def numbers(name: str, rng: np.random.Generator) -> np.ndarray:
    small = rng.standard_normal(400) * 10.0 ** rng.uniform(-6, 1.5, 400)
    return np.concatenate([SPECIAL, small]).astype(np.float32)


@pytest.mark.parametrize("name", sorted(ARITY))
def test_every_function(name: str) -> None:
    rng = np.random.default_rng(sum(map(ord, name)))
    x = numbers(name, rng)
    operands = [x, *(rng.permutation(x) for _ in range(ARITY[name] - 1))]
    if name in ("eq", "logical_and", "where", "pow"):
        operands = [np.round(v) if i or name != "pow" else v for i, v in enumerate(operands)]
    step = plain_step(1)
    types = [TensorType("f32", (1, len(x)))] * len(operands)
    expr = f"{name}({', '.join(f'i{i}' for i in range(len(operands)))})"
    rows = [v[None] for v in operands]
    (want,) = OPERATOR.reference(step.context, Attrs(expr), rows)
    (got,) = execute(OPERATOR, Attrs(expr), types, rows, step, environment(step))
    absolute = 1.2e-7 * np.nan_to_num(np.abs(x), posinf=0) if name.startswith("gelu") else 0.0
    close = np.isclose(got[0], want[0], rtol=6 * 2.0**-23, atol=absolute + 2.0**-126, equal_nan=True)
    worst = int(np.argmin(close))
    assert close.all(), ([v[worst] for v in operands], want[0, worst], got[0, worst])


SHAPES = [
    [("T", 40), ("T", 40)],
    [("T", 40), (40,)],
    [("T", 40), ("T", 1)],
    [("T", 3, 8), ("T", 1, 8), (3, 1)],
    [("T", 2, 3, 5), ("T", 1, 3, 1), (5,)],
    [("T", 7), ()],
    [("T",), ("T",)],
    [(4, 6), (1, 6)],
    [("T", 1500), (1500,)],
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@given(tokens=st.integers(1, 4), x=st.sampled_from(["f32", "bf16"]), y=st.sampled_from(["f32", "bf16"]))
@settings(max_examples=3, deadline=None)
def test_broadcast(shapes: list[tuple[int | str, ...]], tokens: int, x: str, y: str) -> None:
    rng = np.random.default_rng(tokens)
    step = plain_step(tokens)
    types = [TensorType("f32", shape) for shape in shapes]
    inputs = [rng.standard_normal([tokens if d == "T" else d for d in s]).astype(np.float32) for s in shapes]
    expr = "add(mul(i0, 3), i1)" if len(shapes) == 2 else "sub(add(mul(i0, i1), i2), pow(i0, 2))"
    env = environment(step, stored={("in", 0): x, ("out", 0): y})
    given = as_stored(types, inputs, env)
    (want,) = OPERATOR.reference(step.context, Attrs(expr), given)
    (got,) = execute(OPERATOR, Attrs(expr), types, given, step, env)
    tolerance = 2**-8 if y == "bf16" else 1e-6
    np.testing.assert_allclose(got.astype(np.float32).reshape(want.shape), want, rtol=tolerance, atol=1e-6)


def test_integers_become_numbers() -> None:
    step = plain_step(3)
    x = np.array([[1, -2], [3, 400000], [5, 6]], np.int32)
    (got,) = execute(OPERATOR, Attrs("i0"), [TensorType("i32", ("T", 2))], [x], step, environment(step))
    assert got.tolist() == x.tolist()


def test_rounding_is_exact_as_long_as_there_are_fractions() -> None:
    x = np.array(
        [[2.0**22 + 0.5, 2.0**22 + 1.5, 2.0**23 - 0.5, 2.0**23, 2.0**23 + 1, 2.0**24, 2.0**24 + 2, 2.0**25 + 4, 1e30,
          0.0, 0.49999997, 0.5, 0.50000006, 1.0, 1.5, 2.5, 3.0, 3.5, np.inf, np.nan]], np.float32,
    )  # fmt: skip
    x = np.concatenate([x, -x], axis=1)
    step, types = plain_step(1), [TensorType("f32", (1, x.size))]
    (got,) = execute(OPERATOR, Attrs("round(i0)"), types, [x], step, environment(step))
    np.testing.assert_array_equal(got, np.round(x))
