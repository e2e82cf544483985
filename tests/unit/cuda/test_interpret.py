"""The interpreter's arithmetic is the GPU's, its memory is watched, and its failures are named."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmc.builder.cuda.interpret import Address, Interpreter, InterpretError, Launch
from tests.unit.cuda.backend import interpreter

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
CONVERT = (
    HEAD
    + """def convert(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) * factor
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)
"""
)
ARITHMETIC = (
    HEAD
    + """def arithmetic(a, b, y, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    left, right = tl.load(a + rows * N + columns), tl.load(b + rows * N + columns)
    product = tl.dot(left, right, input_precision="ieee")
    mixed = tl.where(left > right, left * right + left, -right)
    tl.store(y + rows * N + columns, product + mixed.to(tl.float32))
"""
)
LOOP = (
    HEAD
    + """def loop(lengths, y):
    total = 0
    for i in range(0, tl.load(lengths + tl.program_id(0))):
        total += i
    tl.store(y + tl.program_id(0), total)
"""
)


def place(offset: int, array: np.ndarray, dtype: str) -> Address:
    interpreter().memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return Address(offset, array.nbytes, dtype)


def result(address: Address, dtype: type) -> np.ndarray:
    return interpreter().memory[address.offset : address.offset + address.nbytes].view(dtype).copy()


@pytest.mark.parametrize(
    ("name", "dtype", "most"), [("bf16", ml_dtypes.bfloat16, None), ("f8e4m3", ml_dtypes.float8_e4m3fn, 448.0)]
)
def test_conversions_round_to_nearest_even_and_saturate(name: str, dtype: type, most: float | None) -> None:
    rng = np.random.default_rng(0)
    every = np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    exact = every.astype(np.float32)[np.isfinite(every.astype(np.float32))]
    exact.sort()
    between = exact[1:] / 2 + exact[:-1] / 2
    x = np.concatenate([exact, between, rng.standard_normal(500).astype(np.float32) * 300, [np.nan, 1e9]])
    x = x.astype(np.float32)
    source = place(0, x, "f32")
    target = place(1 << 20, np.zeros(len(x), dtype), name)
    interpreter().run(
        [
            Launch(
                "x:convert",
                {"x": source, "y": target, "n": len(x), "factor": 1.0},
                {"BLOCK": 65536},
                (3, 1, 1),
                CONVERT,
            )
        ]
    )
    wanted = (x if most is None else np.clip(x, -most, most)).astype(dtype)
    np.testing.assert_array_equal(result(target, dtype).astype(np.float32), wanted.astype(np.float32))


def test_bf16_is_multiplied_compared_and_chosen_as_numbers() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16) for _ in range(2))
    y = place(8192, np.zeros((16, 16), np.float32), "f32")
    args = {"a": place(0, a, "bf16"), "b": place(4096, b, "bf16"), "y": y}
    interpreter().run([Launch("x:arithmetic", args, {"N": 16}, (1, 1, 1), ARITHMETIC)])
    wide = a.astype(np.float32) @ b.astype(np.float32)
    wanted = wide + np.where(a > b, a * b + a, -b).astype(np.float32)
    np.testing.assert_allclose(result(y, np.float32).reshape(16, 16), wanted, rtol=1e-6)


def test_loops_end_where_memory_says() -> None:
    y = place(64, np.zeros(3, np.int32), "i32")
    lengths = place(0, np.array([0, 4, 10], np.int32), "i32")
    interpreter().run([Launch("x:loop", {"lengths": lengths, "y": y}, {}, (3, 1, 1), LOOP)])
    assert result(y, np.int32).tolist() == [0, 6, 45]


def test_what_lies_outside_a_launch_is_not_touched() -> None:
    x = place(0, np.ones(10, np.float32), "f32")
    y = place(64, np.zeros(10, np.float32), "f32")
    args = {"x": x, "y": y, "n": 10, "factor": 2.0}
    for name, address in (("x", Address(0, 36, "f32")), ("y", Address(64, 39, "f32"))):
        wrong = Launch("x:convert", args | {name: address}, {"BLOCK": 16}, (1, 1, 1), CONVERT)
        with pytest.raises(
            InterpretError, match=r"x:convert, program \(0, 0, 0\): a (load|store) of 1 elements outside"
        ):
            interpreter().run([wrong])
    assert not result(y, np.float32).any()
    interpreter().run([Launch("x:convert", args, {"BLOCK": 16}, (1, 1, 1), CONVERT)])
    assert (result(y, np.float32) == 2).all()


def test_a_kernel_that_is_not_there_is_named_and_a_dead_child_too() -> None:
    with Interpreter(4096) as child:
        with pytest.raises(InterpretError, match="nothing"):
            child.run([Launch("x:nothing", {}, {}, (1, 1, 1), CONVERT)])
        child._child.kill()
        with pytest.raises(InterpretError, match="ended with -9"):
            child.run([Launch("x:loop", {}, {}, (1, 1, 1), LOOP)])
