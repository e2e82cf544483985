"""grouped_linear: each token's row times the matrices of the experts that it was routed to (a grouped GEMM).

Comes in: rows, the experts of each, stacked weights with scales and biases. Goes out: a row for each token and expert,
or each token's weighted sum of them. Must not know: builder, runtime, how experts were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import INT4_GROUP, NUMPY_DTYPES, TensorType
from llmc.plugins.linear import check_int8_weight, dequantize, groups, quantize_x, quantize_x_int8
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.pointwise import evaluate, used_inputs


@dataclass(frozen=True)
class Attrs:
    """E4M3 weights with `x_scale` (static), `x_per_token` (each row's largest magnitude / 448), or neither, where x may
    be E4M3; INT8 weights with one of the two (/ 127): see linear.

    `expr`: a formula as `pointwise` has it, of the result i0; with `gated` the weight of an expert holds N/2 gate rows,
    then N/2 up rows, and the formula is of gate i0 and up i1. `combine`: the results of a token, times its weights, are
    added, by ascending expert. `all_reduce`: those sums are added over ranks. `group_start`: as in linear, of an INT4
    weight.
    """

    bias: bool = False
    x_scale: float | None = None
    x_per_token: bool = False
    gated: bool = False
    expr: str = "i0"
    combine: bool = False
    all_reduce: bool = False
    group_start: int = 0


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """x f32[T,K] or f32[T,k,K] (a row for each expert), index i32[T,k], w [E,N,K], (w_scale f32[E,N]) (b f32[E,N])
    (weights f32[T,k] to combine) -> f32[T,k,N], f32[T,k,N/2] when gated, or f32[T,N] when combined. `index` is within
    0..E-1. After an INT4 weight come scales f16[E,N,G] and zero points u4[E,N,G], see linear. An x may be f8e4m3: its
    scales, f32 with 1 for K, are the last input then.
    """
    if (
        len(types) < 3
        or types[0].dtype not in ("f32", "f8e4m3")
        or types[1].dtype != "i32"
        or [t.rank for t in types[1:3]] != [2, 3]
    ):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected x, index i32[T,k] and w [E,N,K] first")
    x, index, w = types[:3]
    if w.dtype not in ("f32", "bf16", "f8e4m3", "i8", "u4") or not all(isinstance(d, int) and d > 0 for d in w.shape):
        raise ValueError(f"the weight is {w}; expected f32, bf16, f8e4m3, i8 or u4 of known size")
    if x.shape not in ((index.shape[0], w.shape[2]), (*index.shape, w.shape[2])):
        raise ValueError(f"{x} does not go with index {index} and weight {w}")
    quantized = w.dtype in ("f8e4m3", "i8")
    if (attrs.x_scale is not None) + attrs.x_per_token > quantized:
        raise ValueError(
            f"x_scale={attrs.x_scale} and x_per_token={attrs.x_per_token}: at most one, and only for f8e4m3 and i8"
        )
    check_int8_weight(w, attrs.x_scale is not None or attrs.x_per_token)
    rounded = x.dtype == "f8e4m3"
    if rounded and (w.dtype != "f8e4m3" or attrs.x_scale is not None or attrs.x_per_token):
        raise ValueError(f"{x} times {w}: x may be f8e4m3 beside a weight that is, and is not rounded again")
    if attrs.x_scale is not None and not 0 < np.float32(attrs.x_scale) < np.inf:
        raise ValueError(f"x_scale={attrs.x_scale} is not a positive float32")
    if not 0 <= attrs.group_start < INT4_GROUP or (attrs.group_start and w.dtype != "u4"):
        raise ValueError(f"group_start={attrs.group_start} is not within 0..{INT4_GROUP - 1}, or the weight is not u4")
    rest = [TensorType("f32", w.shape[:2])] * (quantized + attrs.bias)
    if w.dtype == "u4":
        by_group = (*w.shape[:2], groups(int(w.shape[2]), attrs.group_start))
        rest = [TensorType("f16", by_group), TensorType("u4", by_group), *rest]
    rest += [TensorType("f32", index.shape)] * attrs.combine
    rest += [TensorType("f32", (*x.shape[:-1], 1))] * rounded
    if list(types[3:]) != rest:
        raise ValueError(f"after w come {', '.join(map(str, types[3:]))}; expected {', '.join(map(str, rest))}")
    return (_result(attrs, index, w),)


def _result(attrs: Attrs, index: TensorType, w: TensorType) -> TensorType:
    size = w.shape[1]
    assert isinstance(size, int)
    if used_inputs(attrs.expr) != set(range(1 + attrs.gated)):
        raise ValueError(f"expr {attrs.expr!r} does not read exactly {'i0 and i1' if attrs.gated else 'i0'}")
    if attrs.gated and size % 2:
        raise ValueError(f"gate and up need an even number of rows; the weight is {w}")
    if attrs.combine and (attrs.gated or attrs.expr != "i0"):
        raise ValueError(f"expr {attrs.expr!r} of a result that is combined")
    if attrs.all_reduce and not attrs.combine:
        raise ValueError("only combined results are added over ranks")
    if attrs.combine:
        return TensorType("f32", (index.shape[0], size))
    return TensorType("f32", (*index.shape, size // 2 if attrs.gated else size))


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Products are accumulated in float32 (of INT8 exactly), one expert after the other; weighted sums in float64."""
    x, index, w, *rest = inputs
    tokens, slots = index.shape
    rows = np.repeat(x, slots, axis=0) if x.ndim == 2 else x.reshape(tokens * slots, -1)
    scale: np.ndarray | None = None
    x_scale = np.ones((len(rows), 1), np.float32)
    if x.dtype == NUMPY_DTYPES["f8e4m3"]:
        given = rest.pop()
        x_scale = np.repeat(given, slots, axis=0) if x.ndim == 2 else given.reshape(-1, 1)
    if w.dtype == NUMPY_DTYPES["f8e4m3"]:
        if attrs.x_per_token or attrs.x_scale is not None:
            rows, x_scale = quantize_x(rows, attrs.x_scale)
        scale = rest.pop(0)
    exact: type[np.floating] = np.float32
    if w.dtype == NUMPY_DTYPES["i8"]:
        rows, x_scale = quantize_x_int8(rows, attrs.x_scale)
        scale, exact = rest.pop(0), np.float64  # which holds sums of whole numbers below 2^53
    if w.dtype == NUMPY_DTYPES["u4"]:
        w = dequantize(w, rest.pop(0), rest.pop(0), attrs.group_start)
    bias = rest.pop(0) if attrs.bias else None
    y = np.zeros((len(rows), w.shape[1]), np.float32)
    for expert in np.unique(index):
        own = index.reshape(-1) == expert
        y[own] = rows[own].astype(exact) @ w[expert].astype(exact).T
        if scale is not None:
            y[own] *= x_scale[own] * scale[expert]
        if bias is not None:
            y[own] += bias[expert]
    parts = np.split(y, 2, axis=-1) if attrs.gated else [y]
    out = evaluate(attrs.expr, parts).reshape(tokens, slots, -1)
    if not attrs.combine:
        return (out,)
    total = np.einsum("tkn,tk->tn", out.astype(np.float64), rest.pop(0).astype(np.float64)).astype(np.float32)
    return (context.all_reduce(total) if attrs.all_reduce and context.tp > 1 else total,)


OPERATOR = Operator("grouped_linear", Attrs, infer, reference, rtol=2e-5, atol=2e-5)
