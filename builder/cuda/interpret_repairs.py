"""Repairs of Triton's interpreter (3.6.0), so that what it computes is what the compiled kernel computes.

Comes in: nothing. Goes out: `apply`, and `Memory`, which watches loads and stores. Must not know: launches, operators.

As it is, the interpreter takes the raw bits of bf16 and FP8 for numbers in every arithmetic operation, and rounds
towards zero or wrongly where it converts to them. Here such operations convert to f32, compute, and round to nearest
even, as the instructions of the GPU do; a reduction of such numbers is refused, as no kernel here needs it. A product
of f32 on tensor cores reads its operands as TF32. Memory outside the addresses of a launch cannot be touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

#: Triton's type -> numpy's, of the floats that the interpreter holds as bits.
_NARROW = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
#: Conversions to these saturate (PTX: cvt.rn.satfinite).
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_TF32_BITS = np.uint32(0xFFFFE000)


class Memory:
    """The addresses that the present launch may touch."""

    def __init__(self) -> None:
        self.first = self.last = np.zeros(0, np.uint64)

    def allow(self, extents: Iterable[tuple[int, int]]) -> None:
        """First byte and the one behind the last of each part; they may overlap."""
        ordered = np.array(sorted(extents), np.uint64).reshape(-1, 2)
        self.first, self.last = ordered[:, 0], np.maximum.accumulate(ordered[:, 1])

    def check(self, what: str, pointers: TensorHandle, mask: TensorHandle) -> None:
        """Raises IndexError where an element that `mask` does not hide lies outside."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        touched = pointers.data[np.broadcast_to(mask.data.astype(np.bool_), pointers.data.shape)]
        part = np.searchsorted(self.first, touched, side="right") - 1
        outside = (part < 0) | (touched + np.uint64(size) > self.last[part])
        if outside.any():
            raise IndexError(f"{what} of {outside.sum()} elements outside the addresses of the launch")


def _numbers(handle: TensorHandle) -> np.ndarray:
    """The elements as numpy computes with them: narrow floats as f32."""
    narrow = _NARROW.get(handle.dtype.scalar)
    if narrow is None:
        return np.asarray(handle.data)
    return np.ascontiguousarray(handle.data).view(narrow).astype(np.float32)


def _handle(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """Elements of `dtype`, rounded to it; truths stay truths."""
    if dtype in _NARROW and values.dtype != np.bool_:
        largest = _LARGEST.get(dtype)
        if largest is not None:
            values = np.clip(values, -largest, largest)
        rounded = values.astype(np.float32).astype(_NARROW[dtype])
        return TensorHandle(rounded.view(f"u{rounded.itemsize}"), dtype)
    return TensorHandle(values, dtype)


def _cast(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype, *rest: Any) -> TensorHandle:
    target = target.scalar
    values = _numbers(source)
    if target not in _NARROW:
        values = values.astype(interpreter._get_np_dtype(target))
    return _handle(values, target)


def _dot(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise: int
) -> TensorHandle:
    operands = [_numbers(a), _numbers(b)]
    if precision == ir.INPUT_PRECISION.TF32 and operands[0].dtype == np.float32 and a.dtype.scalar == tl.float32:
        operands = [(np.ascontiguousarray(x).view(np.uint32) & _TF32_BITS).view(np.float32) for x in operands]
    return TensorHandle(np.matmul(*operands, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    exact = _numbers(x).astype(np.float64) * _numbers(y) + _numbers(z)
    return _handle(exact.astype(_numbers(z).dtype), z.dtype.scalar)


def _by_number(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """An operation of the builder that computes on numbers also where an operand is a narrow float."""

    def operation(self: InterpreterBuilder, *given: Any) -> TensorHandle:
        *handles, function = given
        narrow = [h.dtype.scalar for h in handles if h.dtype.scalar in _NARROW]
        if not narrow:
            return original(self, *given)
        return _handle(function(*map(_numbers, handles)), narrow[0])

    return operation


def _refuse_narrow(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduction(self: Any, given: Any, *rest: Any, **named: Any) -> Any:
        first = given[0] if isinstance(given, tuple) else given
        if first.dtype in _NARROW:
            raise TypeError(f"a reduction of {first.dtype}: convert it to f32 first")
        return original(self, given, *rest, **named)

    return reduction


def _watch(memory: Memory) -> None:
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_load(
        self: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *rest: Any, **named: Any
    ) -> Any:
        memory.check("a load", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def watched_store(
        self: InterpreterBuilder, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any
    ) -> Any:
        memory.check("a store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = watched_load
    InterpreterBuilder.create_masked_store = watched_store


class _Nothing:
    def restore(self) -> None:
        """Nothing was changed."""


def apply() -> Memory:
    """Repairs the interpreter for the rest of this process."""
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "int_cast", "fp_to_fp"):
        setattr(InterpreterBuilder, f"create_{name}", _cast)
    for name in ("binary_op", "unary_op"):
        setattr(InterpreterBuilder, name, _by_number(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_dot, InterpreterBuilder.create_fma = _dot, _fma
    for name in ("sum", "min_max"):
        setattr(interpreter.ReduceOps, name, _refuse_narrow(getattr(interpreter.ReduceOps, name)))
    interpreter_options = interpreter.interpreter_builder.options
    object.__setattr__(interpreter_options, "sanitize_overflow", False)  # it only costs time: nothing is asserted
    # Replaced for good and once: the interpreter would do it again at every call of every function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())  # numpy 2.4 converts 0-d arrays alone
    interpreter._patch_lang = lambda function: _Nothing()
    memory = Memory()
    _watch(memory)
    return memory
