"""From ATen operators that compute to primitives.

Comes in: an `Emitter` and a traced node's arguments. Goes out: `TABLE`. Must not know: model families.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from llmc.artifacts.types import Dim
from llmc.builder.trace.emitter import Emitter, Name, Value
from llmc.builder.trace.shapes import cut, reshape
from llmc.builder.trace.table import IDENTITIES, Table, Translation, entering

TABLE: Table = {}
aten = entering(TABLE)


@aten(*sorted(IDENTITIES))
def _identity(e: Emitter, input: Value | None = None, self: Value | None = None, a: Value | None = None,
              **options: Any) -> Value:  # fmt: skip
    value = next(v for v in (input, self, a) if v is not None)
    return value


@aten("to", "_to_copy", "type_as", "float")
def _to(e: Emitter, self: Value, **options: Any) -> Value:
    """A change of dtype; devices and memory formats mean nothing here."""
    assert e.at is not None
    return cast(e, e.value(self), e.dtype(e.at.meta["val"].dtype))


def cast(e: Emitter, x: Name, dtype: str) -> Name:
    """The value in another dtype; itself where it has that already."""
    return x if e.types[x].dtype == dtype else e.emit("cast", [x], dtype=dtype)


# -- elementwise

UNARY = ("neg", "exp", "log", "tanh", "cos", "sin", "sqrt", "rsqrt", "sigmoid", "silu", "relu", "erf", "abs", "square",
         "reciprocal", "floor", "ceil", "sign", "log1p", "expm1")  # fmt: skip


def _unary(op: str) -> Translation:
    return lambda e, self, **_: e.emit(op, [e.value(self)])


for _name in UNARY:
    TABLE[_name] = _unary(_name)


@aten("round")
def _round(e: Emitter, self: Value, decimals: int = 0) -> Value:
    if decimals:
        raise e.unsupported(f"decimals={decimals} has no translation")
    return e.emit("round", [e.value(self)])


@aten("gelu")
def _gelu(e: Emitter, self: Value, approximate: str = "none") -> Value:
    return e.emit("gelu" if approximate == "none" else "gelu_tanh", [e.value(self)])


def binary(e: Emitter, op: str, left: Any, right: Any) -> Name:
    """Both operands in the result's dtype; numbers become constants."""
    assert e.at is not None
    dtype = e.dtype(e.at.meta["val"].dtype)
    operands = []
    for operand in (left, right):
        if isinstance(operand, Name | torch.Tensor):
            operands.append(cast(e, e.value(operand), dtype))
        elif isinstance(operand, int | float):
            operands.append(e.scalar(operand, dtype))
        else:
            raise e.unsupported("it computes with the number of tokens")
    return e.emit(op, operands)


@aten("add", "sub", "rsub")
def _add(e: Emitter, self: Any, other: Any, alpha: Any = 1) -> Value:
    assert e.at is not None
    name = str(e.at.target).split(".")[1].rstrip("_")
    if alpha != 1:
        other = binary(e, "mul", other, alpha)
    return binary(e, "sub", other, self) if name == "rsub" else binary(e, name, self, other)


_BINARY = {"multiply": "mul", "max": "maximum", "min": "minimum"}


@aten("mul", "maximum", "minimum", "multiply", "max.other", "min.other")
def _plain_binary(e: Emitter, self: Any, other: Any) -> Value:
    assert e.at is not None
    name = str(e.at.target).split(".")[1].rstrip("_")
    return binary(e, _BINARY.get(name, name), self, other)


@aten("div", "true_divide", "divide")
def _div(e: Emitter, self: Any, other: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        raise e.unsupported(f"rounding_mode {rounding_mode!r} has no translation")
    return binary(e, "div", self, other)


@aten("pow")
def _pow(e: Emitter, self: Any, exponent: Any) -> Value:
    return binary(e, "pow", self, exponent)


@aten("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "relu6")
def _clamp(
    e: Emitter, self: Value, min: Any = None, max: Any = None, min_val: Any = None, max_val: Any = None
) -> Value:
    assert e.at is not None
    low, high = (min if min is not None else min_val), (max if max is not None else max_val)
    if "relu6" in str(e.at.target):
        low, high = 0, 6
    value = e.value(self)
    value = value if low is None else binary(e, "maximum", value, low)
    return value if high is None else binary(e, "minimum", value, high)


@aten("leaky_relu")
def _leaky_relu(e: Emitter, self: Value, negative_slope: float = 0.01) -> Value:
    x = e.value(self)
    return e.emit("maximum" if negative_slope <= 1 else "minimum", [x, binary(e, "mul", x, negative_slope)])


@aten("softplus")
def _softplus(e: Emitter, self: Value, beta: float = 1, threshold: float = 20) -> Value:
    """max(x, 0) + log(1 + exp(-|x|)), which is what the threshold is there to approximate."""
    x = e.value(self) if beta == 1 else binary(e, "mul", self, beta)
    small = e.emit("exp", [e.emit("neg", [e.emit("abs", [x])])])
    out = e.emit("add", [e.emit("relu", [x]), e.emit("log", [binary(e, "add", small, 1.0)])])
    return out if beta == 1 else binary(e, "div", out, beta)


@aten("elu")
def _elu(e: Emitter, self: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    if (scale, input_scale) != (1, 1):
        raise e.unsupported(f"scale={scale} and input_scale={input_scale} have no translation")
    x = e.value(self)
    below = binary(e, "sub", e.emit("exp", [binary(e, "minimum", x, 0.0)]), 1.0)
    return e.emit("add", [e.emit("relu", [x]), binary(e, "mul", below, alpha)])


# -- reductions


@aten("mean", "sum", "amax")
def _reduce(e: Emitter, self: Value, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    assert e.at is not None
    kind = {"mean": "mean", "sum": "sum", "amax": "max"}[str(e.at.target).split(".")[1]]
    x = e.value(self)
    axes = [dim] if isinstance(dim, int) else list(dim or range(e.types[x].rank))
    for axis in sorted((a % e.types[x].rank for a in axes), reverse=True):
        x = e.emit("reduce", [x], kind=kind, axis=axis - e.types[x].rank, keepdim=keepdim)
    return x


@aten("std", "var")
def _spread(e: Emitter, self: Value, dim: Any = None, unbiased: bool = True, correction: Any = None,
            keepdim: bool = False) -> Value:  # fmt: skip
    """The sum of squared distances to the mean, over the count less 1 (or what is asked for); and its root."""
    assert e.at is not None
    x = e.value(self)
    rank = e.types[x].rank
    axes = [dim] if isinstance(dim, int) else list(dim or [])
    size = e.types[x].shape[axes[0]] if len(axes) == 1 else None
    if not isinstance(size, int):
        raise e.unsupported("it has no translation but over one axis of fixed size")
    less = correction if correction is not None else int(unbiased)
    if not isinstance(less, int | float) or less >= size:
        raise e.unsupported(f"a correction of {less} for {size} numbers has no translation")
    axis = axes[0] % rank - rank
    mean = e.emit("reduce", [x], kind="mean", axis=axis, keepdim=True)
    squares = e.emit("square", [e.emit("sub", [x, mean])])
    total = e.emit("reduce", [squares], kind="sum", axis=axis, keepdim=keepdim)
    variance = e.emit("div", [total, e.scalar(float(size - less), "f32")])
    return e.emit("sqrt", [variance]) if str(e.at.target).split(".")[1] == "std" else variance


@aten("softmax", "_softmax")
def _softmax(e: Emitter, self: Value, dim: int, **options: Any) -> Value:
    x = e.value(self)
    axis = dim % e.types[x].rank - e.types[x].rank
    peak = e.emit("reduce", [x], kind="max", axis=axis, keepdim=True)
    weights = e.emit("exp", [e.emit("sub", [x, peak])])
    return e.emit("div", [weights, e.emit("reduce", [weights], kind="sum", axis=axis, keepdim=True)])


# -- layers


@aten("embedding")
def _embedding(e: Emitter, weight: Value, indices: Value, **options: Any) -> Value:
    return e.emit("embedding", [e.value(indices), e.value(weight)])


@aten("index_select")
def _index_select(e: Emitter, self: Value, dim: int, index: Value) -> Value:
    table = e.value(self)
    if dim != 0 or e.types[table].rank != 2 or e.types[e.value(index)].rank != 1:
        raise e.unsupported("only rows of tables can be selected")
    return e.emit("embedding", [e.value(index), table])


@aten("layer_norm", "native_layer_norm")
def _layer_norm(e: Emitter, input: Value, normalized_shape: Sequence[int], weight: Value | None = None,
                bias: Value | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Value:  # fmt: skip
    if len(normalized_shape) != 1:
        raise e.unsupported(f"it normalises over {len(normalized_shape)} axes")
    size = normalized_shape[0]
    w = e.value(torch.ones(size) if weight is None else weight)
    b = e.value(torch.zeros(size) if bias is None else bias)
    return e.emit("layer_norm", [e.value(input), w, b], eps=eps)


@aten("rms_norm")
def _rms_norm(e: Emitter, input: Value, normalized_shape: Sequence[int], weight: Value | None = None,
              eps: float | None = None) -> Value:  # fmt: skip
    if len(normalized_shape) != 1:
        raise e.unsupported(f"it normalises over {len(normalized_shape)} axes")
    w = e.value(torch.ones(normalized_shape[0]) if weight is None else weight)
    return e.emit("rms_norm", [e.value(input), w], eps=torch.finfo(torch.float32).eps if eps is None else eps)


@aten("linear")
def _linear(e: Emitter, input: Value, weight: Value, bias: Value | None = None) -> Value:
    return linear(e, e.value(input), e.value(weight), None if bias is None else e.value(bias))


@aten("addmm")
def _addmm(e: Emitter, self: Value, mat1: Value, mat2: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    if (beta, alpha) != (1, 1):
        raise e.unsupported(f"beta={beta} and alpha={alpha} have no translation")
    return product(e, e.value(mat1), e.value(mat2), e.value(self))


@aten("matmul", "mm", "bmm")
def _matmul(e: Emitter, self: Value, mat2: Value | None = None, other: Value | None = None, **options: Any) -> Value:
    right = mat2 if other is None else other
    assert right is not None
    return product(e, e.value(self), e.value(right), None)


def product(e: Emitter, x: Name, matrix: Name, bias: Name | None) -> Name:
    """x times a matrix stored by inputs: a linear layer where the matrix is a weight, or where x is one."""
    lead = e.types[matrix].shape[:-2]
    if x in e.recipes and e.types[x].rank == 2 and matrix not in e.recipes and bias is None:
        order = (*range(len(lead)), len(lead) + 1, len(lead))
        out = linear(e, e.emit("transpose", [matrix], f"{matrix}.turned", perm=order), x, None)
        return e.emit("transpose", [out], perm=order)
    turned = e.transposed(matrix)
    if turned is not None:
        return linear(e, x, turned, bias)
    by_expert = len(lead) == 1 and e.types[x].shape == (*lead, "T", e.types[matrix].shape[-2])
    if matrix in e.recipes and bias is None and by_expert:
        return _by_expert(e, x, matrix)
    out = e.emit("matmul", [x, matrix])
    return out if bias is None else e.emit("add", [out, bias])


def _by_expert(e: Emitter, x: Name, stack: Name) -> Name:
    """x [E,T,K] times a stack of weights [E,K,N]: every token's rows, each times the matrix of its own expert. The path
    is that of the parameter, as of experts that are chosen.
    """
    experts = e.types[stack].shape[0]
    assert isinstance(experts, int)
    numbers = reshape(e, e.const("i32", range(experts)), (1, experts))
    index = e.emit("broadcast", [numbers], f"{stack}.all", shape=("T", experts))
    rows = e.emit("transpose", [x], f"{x}.rows", perm=(1, 0, 2))
    turned = e.emit("transpose", [stack], f"{stack}.turned", perm=(0, 2, 1))
    out = e.emit("grouped_linear", [rows, index, turned])
    e.nodes[-1] = e.nodes[-1].replace(path=str(stack))
    return e.emit("transpose", [out], perm=(1, 0, 2))


def linear(e: Emitter, x: Name, weight: Name, bias: Name | None) -> Name:
    """x [..,K] times a weight [N,K]: as `linear` over [M,K] where M is one symbol or number, as `matmul` otherwise."""
    lead = e.types[x].shape[:-1]
    rows = _rows(lead)
    if rows is None or weight not in e.recipes:
        turned = e.transposed(weight) or e.emit("transpose", [weight], perm=(1, 0))
        out = e.emit("matmul", [x, turned])
        return out if bias is None else e.emit("add", [out, bias])
    flat = reshape(e, x, (rows, e.types[x].shape[-1]), f"{x}.flat")
    inputs = [flat, weight] if bias is None else [flat, weight, bias]
    out = e.emit("linear", inputs, bias=bias is not None)
    return reshape(e, out, (*lead, e.types[out].shape[-1]), f"{out}.batched")


def _rows(lead: Sequence[Dim]) -> Dim | None:
    """The number of rows that leading dimensions flatten to: a symbol alone or a number."""
    symbols = [d for d in lead if isinstance(d, str)]
    number = math.prod(d for d in lead if isinstance(d, int))
    if not symbols:
        return number
    return symbols[0] if len(symbols) == 1 and number == 1 else None


@aten("index")
def _index(e: Emitter, self: Value, indices: Sequence[Value | None]) -> Value:
    """x[:, rows] with one row axis, everything before it of size 1; or the rows of a table that ids name."""
    given = [i for i in indices if i is not None]
    x = e.value(self)
    kind, axis = e.types[x], len(indices) - 1
    index = given[0] if len(given) == 1 else None
    known = isinstance(index, torch.Tensor) and index.device.type != "meta" and index.shape == (1,)
    if known and not isinstance(kind.shape[axis], str):
        assert isinstance(index, torch.Tensor)
        size = kind.shape[axis]
        assert isinstance(size, int)
        return cut(e, x, axis, int(index) % size, int(index) % size + 1)
    if len(given) != 1 or indices[-1] is None or any(d != 1 for d in kind.shape[:axis]):
        raise e.unsupported("only rows of tokens can be selected")
    index = e.value(given[0])
    if e.types[index].dtype != "i32":
        raise e.unsupported("it selects by a mask")
    if not isinstance(kind.shape[axis], str):
        if axis or kind.rank != 2:
            raise e.unsupported("only rows of tokens and of tables can be selected")
        return e.emit("embedding", [index, x])
    width = math.prod(d for d in kind.shape[axis + 1 :] if isinstance(d, int))
    picked = e.emit("select_rows", [reshape(e, x, (kind.shape[axis], width), f"{x}.flat"), index])
    return reshape(e, picked, (*kind.shape[:axis], *e.types[index].shape, *kind.shape[axis + 1 :]), f"{picked}.batched")


@aten("llmc.attention")
def _attention(e: Emitter, q: Value, k: Value, v: Value, layer: int, scale: float, window: int | None,
               softcap: float | None, chunk: int | None = None, slopes: Sequence[float] | None = None,
               sinks: Value | None = None) -> Value:  # fmt: skip
    inputs = [e.value(q), e.value(k), e.value(v)]
    _, kv_heads, _, head_dim = e.types[inputs[1]].shape
    by_head = [None if slopes is None else torch.tensor(slopes), sinks]
    return e.emit("attention", [*inputs, *(e.value(x) for x in by_head if x is not None)], layer=layer, scale=scale,
                  window=window, softcap=softcap, kv_heads=kv_heads, head_dim=head_dim,
                  v_dim=e.types[inputs[2]].shape[3], chunk=chunk, slopes=slopes is not None,
                  sinks=sinks is not None)  # fmt: skip
