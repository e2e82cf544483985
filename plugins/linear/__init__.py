"""linear: x times a weight in fp32, bf16, FP8 E4M3, INT8 or INT4, with bias, activation or gated product, and sum over
ranks.

Comes in: x, the weight by output rows, its scales, the bias. Goes out: one f32 matrix. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import FP8_MAX, INT4_GROUP, INT8_MAX, NUMPY_DTYPES, TensorType
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.pointwise.functions import UNARY

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
EPILOGUES = ("none", *ACTIVATIONS, *(f"{name}_gate" for name in ACTIVATIONS))
#: Columns of an INT8 weight, at most: so many products of INT8 numbers fit a sum of 32 bits.
INT8_COLUMNS = 1 << 17
#: Which input the factors of `x_factors` are.
FACTORS = 3


@dataclass(frozen=True)
class Attrs:
    """Beside an E4M3 weight x is E4M3 too, by `x_scale` (static) or `x_per_token` (each row's largest magnitude / 448),
    or with neither as it is: f32, or E4M3 with scales, as `quantize` made it. Beside an INT8 weight it is INT8 (each
    row's largest magnitude / 127), with `x_factors` after its columns were multiplied by a factor each. `epilogue`: an
    activation of the result, or with `_gate`: the weight holds N/2 gate rows, then N/2 up rows, and act(gate) * up is
    the result. `all_reduce`: results are summed over ranks; the bias is added once, after the sum. `group_start`: how
    many columns of the first group of an INT4 weight are on other ranks.
    """

    bias: bool = False
    x_scale: float | None = None
    x_per_token: bool = False
    x_factors: bool = False
    epilogue: str = "none"
    all_reduce: bool = False
    group_start: int = 0


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[M,K], w [N,K], (w_scale f32[N],) (x_factors f32[K],) (b f32[N]) -> f32[M,N], or f32[M,N/2] when gated.
    Beside an E4M3 weight x may be f8e4m3[M,K]; its scales f32[M,1] are the last input then.

    After an INT4 weight come scales f16[N,G] and zero points u4[N,G] of its G groups of 128 columns, of which the last
    (and behind a `group_start` the first) may be smaller.
    """
    if len(types) < 2 or types[0].dtype not in ("f32", "f8e4m3") or [t.rank for t in types[:2]] != [2, 2]:
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x f32|f8e4m3[M,K] and w [N,K] first")
    x, w = types[0], types[1]
    quantized = w.dtype in ("f8e4m3", "i8")
    if w.dtype not in ("f32", "bf16", "f8e4m3", "i8", "u4"):
        raise ValueError(f"the weight is {w}; expected f32, bf16, f8e4m3, i8 or u4")
    if x.shape[1] != w.shape[1] or not all(isinstance(d, int) and d > 0 for d in w.shape):
        raise ValueError(f"{x} times {w}: K must be the same number in both")
    if (attrs.x_scale is not None) + attrs.x_per_token > quantized:
        raise ValueError(
            f"x_scale={attrs.x_scale} and x_per_token={attrs.x_per_token}: at most one, and only for f8e4m3 and i8"
        )
    rounded = x.dtype == "f8e4m3"
    if rounded and (w.dtype != "f8e4m3" or attrs.x_scale is not None or attrs.x_per_token):
        raise ValueError(f"{x} times {w}: x may be f8e4m3 beside a weight that is, and is not rounded again")
    check_int8_weight(w, attrs.x_scale is not None or attrs.x_per_token)
    if attrs.x_factors and w.dtype != "i8":
        raise ValueError(f"x_factors beside {w}: only for i8")
    if attrs.x_scale is not None and not 0 < np.float32(attrs.x_scale) < np.inf:
        raise ValueError(f"x_scale={attrs.x_scale} is not a positive float32")
    if attrs.epilogue not in EPILOGUES:
        raise ValueError(f"epilogue {attrs.epilogue!r} is not one of {', '.join(EPILOGUES)}")
    if attrs.all_reduce and attrs.epilogue != "none":
        raise ValueError(f"epilogue {attrs.epilogue!r} of a partial sum")
    if not 0 <= attrs.group_start < INT4_GROUP or (attrs.group_start and w.dtype != "u4"):
        raise ValueError(f"group_start={attrs.group_start} is not within 0..{INT4_GROUP - 1}, or the weight is not u4")
    size = w.shape[0]
    assert isinstance(size, int)
    factors = [TensorType("f32", w.shape[1:])] * attrs.x_factors
    rest = [*[TensorType("f32", (size,))] * quantized, *factors, *[TensorType("f32", (size,))] * attrs.bias]
    if w.dtype == "u4":
        shape = (size, groups(int(w.shape[1]), attrs.group_start))
        rest = [TensorType("f16", shape), TensorType("u4", shape), *rest]
    rest += [TensorType("f32", (x.shape[0], 1))] * rounded
    if list(types[2:]) != rest:
        raise ValueError(f"after w come {', '.join(map(str, types[2:]))}; expected {', '.join(map(str, rest))}")
    if attrs.epilogue.endswith("_gate"):
        if size % 2:
            raise ValueError(f"gate and up need an even number of rows; the weight is {w}")
        size //= 2
    return (TensorType("f32", (x.shape[0], size)),)


def check_int8_weight(w: TensorType, x_rounded: bool) -> None:
    """Raises ValueError where w [...,K] is INT8 and x stays as it is, or K is too large for exact sums."""
    if w.dtype != "i8":
        return
    if not x_rounded:
        raise ValueError("beside an i8 weight x is rounded: x_scale or x_per_token is missing")
    if int(w.shape[-1]) > INT8_COLUMNS:
        raise ValueError(f"the weight is {w}: sums of more than {INT8_COLUMNS} products could leave 32 bits")


def groups(columns: int, start: int = 0) -> int:
    """How many groups of an INT4 weight that many columns lie in, the first of them column `start` of its group."""
    return -(-(start + columns) // INT4_GROUP)


def dequantize(w: np.ndarray, scale: np.ndarray, zero: np.ndarray, start: int = 0) -> np.ndarray:
    """f32[N,K]: (w - zero) * scale of an INT4 weight u4[N,K] with scales [N,G] and zero points u4[N,G], or of a stack
    of such; exact where the scales are f16.
    """
    group = (start + np.arange(w.shape[-1])) // INT4_GROUP
    return (w.astype(np.float32) - zero.astype(np.float32)[..., group]) * scale.astype(np.float32)[..., group]


def quantize_x(x: np.ndarray, x_scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """x f32[M,K] -> (E4M3 of x / scale, saturated at 448, rounded to nearest even; the scales f32[M,1]).

    Without `x_scale` each row's scale is its largest magnitude / 448, and 1 for a row of zeros.
    """
    if x_scale is None:
        amax = np.abs(x).max(axis=-1, keepdims=True)
        scale = np.where(amax == 0, np.float32(1), amax / np.float32(FP8_MAX)).astype(np.float32)
    else:
        scale = np.full((len(x), 1), x_scale, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.clip(x / scale, -FP8_MAX, FP8_MAX).astype(NUMPY_DTYPES["f8e4m3"]), scale


def quantize_x_int8(x: np.ndarray, x_scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """x f32[M,K] -> (i8[M,K] of x / scale, saturated at 127, rounded to nearest even; the scales f32[M,1]).

    Without `x_scale` each row's scale is its largest magnitude / 127, and 1 where that is no float above zero. The
    scale of a row that is not finite is NaN.
    """
    amax = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (amax / np.float32(INT8_MAX) if x_scale is None else np.full_like(amax, x_scale)).astype(np.float32)
        scale = np.where(scale > 0, scale, np.float32(1))
        numbers = np.clip(np.rint(np.nan_to_num(x / scale, nan=0)), -INT8_MAX, INT8_MAX).astype(np.int8)
    return numbers, np.where(np.isfinite(amax), scale, np.float32(np.nan))


def _activation(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return UNARY.get(name, lambda x: x)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Products are accumulated in float32; whoever compares a kernel bit for bit needs its order over k. Those of INT8
    are summed exactly, as the kernel does. Kernels that multiply bf16 (of GPUs, of cpu:x86-64-v4-bf16 and -amx) compute
    this of x rounded to bf16.
    """
    x, w, *rest = inputs
    scale = np.ones((1, 1), np.float32)
    if w.dtype == NUMPY_DTYPES["f8e4m3"]:
        scale = rest.pop(0)[None, :]
        if x.dtype == w.dtype:
            scale = rest.pop() * scale
        elif attrs.x_per_token or attrs.x_scale is not None:
            x, x_scale = quantize_x(x, attrs.x_scale)
            scale = x_scale * scale
    if w.dtype == NUMPY_DTYPES["u4"]:
        w = dequantize(w, rest.pop(0), rest.pop(0), attrs.group_start)
    exact: type[np.floating] = np.float32
    if w.dtype == NUMPY_DTYPES["i8"]:
        scale = rest.pop(0)[None, :]
        x, x_scale = quantize_x_int8(x * rest.pop(0) if attrs.x_factors else x, attrs.x_scale)
        scale, exact = x_scale * scale, np.float64  # which holds sums of whole numbers below 2^53
    y = (x.astype(exact) @ w.astype(exact).T).astype(np.float32) * scale
    if attrs.all_reduce:
        y = context.all_reduce(y) if context.tp > 1 else y
    if attrs.bias:
        y = y + rest.pop(0)
    act, gate, _ = attrs.epilogue.partition("_gate")
    if gate:
        left, right = np.split(y, 2, axis=-1)
        return (_activation(act)(left.astype(np.float64)).astype(np.float32) * right,)
    return (_activation(act)(y.astype(np.float64)).astype(np.float32),)


OPERATOR = Operator("linear", Attrs, infer, reference, rtol=2e-5, atol=2e-5)
