"""The elementwise functions of kernels against float64: within a few ulps, and the same bits on every ISA level."""

from functools import cache

import numpy as np
import pytest

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import KernelEnv
from llmc.plugins.pointwise import Attrs, infer
from llmc.plugins.pointwise.cpu import launch
from llmc.plugins.pointwise.functions import ARITY, BINARY, FUNCTIONS, TRUTHS, UNARY
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.harness import Library

#: Units in the last place of the result; of the larger of result and argument for those that cancel below 0.
ULPS = dict.fromkeys(UNARY, 1.0) | {"tanh": 2, "sigmoid": 2.5, "silu": 3, "rsqrt": 1.5}
#: Below this size errors are measured against it: kernels give 0 for what is nearly 0.
FLOORS = {"sigmoid": 1e-30, "silu": 1e-30}
CANCELLING = {"gelu", "gelu_tanh"}
NAMES = list(FUNCTIONS)


@cache
def library(isa: str) -> Library:
    x = TensorType("f32", ("T",))
    calls = []
    for name in NAMES:
        types = [x] * ARITY[name]
        attrs = Attrs(f"{name}({', '.join(f'i{i}' for i in range(len(types)))})")
        calls.append(launch(attrs, types, infer(attrs, types), KernelEnv((1, 1 << 20), (0, 1))))
    return Library(calls, isa)


def compute(isa: str, name: str, *inputs: np.ndarray) -> np.ndarray:
    y = aligned(np.zeros(len(inputs[0]), np.float32))
    library(isa).run(NAMES.index(name), [aligned(x) for x in inputs], [y], tokens=len(y))
    return y


def grid() -> np.ndarray:
    """Every 2,999th float of either sign, NaN and infinities included, and the plain numbers between."""
    bits = np.arange(0, 1 << 32, 2999 * 16, np.uint32).view(np.float32)
    near = np.linspace(-12, 12, 20001, dtype=np.float32)
    ends = np.linspace(-110, 110, 5001, dtype=np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
    return np.concatenate([bits, near, ends, special])


def check(got: np.ndarray, want: np.ndarray, ulps: float, floor: np.ndarray | float = 0) -> None:
    """Within `ulps` of the float64 truth; NaN, infinities and overflow exactly."""
    with np.errstate(over="ignore"):
        rounded = want.astype(np.float32)
    finite = np.isfinite(rounded) & np.isfinite(got)
    edge = np.abs(rounded) >= np.float32(3.4e38)  # one side may round to infinity
    np.testing.assert_array_equal(got[~finite & ~edge], rounded[~finite & ~edge])
    step = np.spacing(np.maximum(np.abs(rounded[finite]), floor[finite] if isinstance(floor, np.ndarray) else floor))
    error = np.abs(got[finite].astype(np.float64) - want[finite]) / step
    assert error.max() <= ulps, f"{error.max()} at {np.flatnonzero(finite)[error.argmax()]}"


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(name: str) -> None:
    x = grid()
    if name in ("sin", "cos"):
        x = x[~(np.abs(x) >= 2**53)]
    results = [compute(isa, name, x) for isa in ISAS]
    with np.errstate(all="ignore"):
        want = UNARY[name](x.astype(np.float64))
    if name in CANCELLING:
        x = np.where(np.isfinite(x), np.maximum(np.abs(x), 1e-30), 1).astype(np.float32)
        check(results[0], want, 4, floor=x)
    else:
        check(results[0], want, ULPS[name], floor=FLOORS.get(name, 1e-37))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("name", [*sorted(TRUTHS), "where"])
def test_truths_and_choices_are_exact(name: str) -> None:
    special = np.array([0, -0.0, 1, -1, 0.5, 1e-40, np.inf, -np.inf, np.nan, 7], np.float32)
    operands = [np.ravel(v) for v in np.meshgrid(*[special] * ARITY[name])]
    want = FUNCTIONS[name](*(o.astype(np.float64) for o in operands)).astype(np.float32)
    for isa in ISAS:
        np.testing.assert_array_equal(compute(isa, name, *operands), want)


@pytest.mark.parametrize("name", sorted(BINARY))
def test_binary(name: str) -> None:
    rng = np.random.default_rng(0)
    special = np.array([0, -0.0, 1, -1, 2, -2, 3, 0.5, -0.5, 1e-40, 1e30, np.inf, -np.inf, np.nan], np.float32)
    a, b = (np.ravel(v) for v in np.meshgrid(special, special))
    a = np.concatenate([a, rng.standard_normal(5000).astype(np.float32) * 20])
    b = np.concatenate([b, rng.standard_normal(5000).astype(np.float32) * 8])
    results = [compute(isa, name, a, b) for isa in ISAS]
    with np.errstate(all="ignore"):
        want = BINARY[name](a.astype(np.float64), b.astype(np.float64))
    check(results[0], want, 1, floor=1e-37)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
