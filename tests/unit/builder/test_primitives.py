"""Primitives: the references against PyTorch, the type rules against the references, and what the rules refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.types import Dim, TensorType
from llmc.builder.operators import ALL
from llmc.builder.primitives import PRIMITIVES
from llmc.builder.primitives.elementwise import BINARY, UNARY
from llmc.plugins.operator import KVCache, StepContext

TOKENS = 5
CONTEXT = StepContext(4, np.array([0, TOKENS]), np.array([TOKENS]), np.zeros((1, 2), np.int32))


def kind_of(array: np.ndarray) -> TensorType:
    """The type of an array whose axes of TOKENS entries are T."""
    dims: tuple[Dim, ...] = tuple("T" if d == TOKENS else d for d in array.shape)
    return TensorType({"float32": "f32", "int32": "i32"}[array.dtype.name], dims)


def apply(op: str, *arrays: np.ndarray, **attrs: Any) -> np.ndarray:
    """The reference's result, whose type must be what the rule says."""
    operator = PRIMITIVES[op]
    values = operator.attrs(**attrs)
    (out,) = operator.reference(CONTEXT, values, arrays)
    assert operator.infer(values, [kind_of(a) for a in arrays]) == (kind_of(out),)
    return out


def infer(op: str, *types: str, **attrs: Any) -> TensorType:
    operator = PRIMITIVES[op]
    return operator.infer(operator.attrs(**attrs), [TensorType.parse(t) for t in types])[0]


def values(*shape: int, low: float = -3.0) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, 3.0, shape).astype(np.float32)


TORCH_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in UNARY if hasattr(torch, name)},
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str) -> None:
    x = values(TOKENS, 64, low=0.01 if op in ("log", "sqrt", "rsqrt", "reciprocal") else -3.0)
    wanted = TORCH_UNARY[op](
        torch.tensor(x, dtype=torch.float64)
    ).numpy()  # its float32 gelu is off by 1e-4 in the tail
    np.testing.assert_allclose(apply(op, x), wanted, rtol=1e-6)


@pytest.mark.parametrize("op", ["sigmoid", "silu", "gelu", "gelu_tanh", "tanh"])
def test_unary_far_from_zero(op: str) -> None:
    x = np.array([-1e4, -100, 100, 1e4], np.float32)
    np.testing.assert_allclose(apply(op, x), TORCH_UNARY[op](torch.tensor(x)).numpy(), atol=1e-30)


@pytest.mark.parametrize("op", BINARY)
def test_binary_broadcasts(op: str) -> None:
    names = {"div": "divide"}
    x, y = values(TOKENS, 3, 1, low=0.5), values(4, low=0.5)
    wanted = getattr(torch, names.get(op, op))(torch.tensor(x), torch.tensor(y)).numpy()
    np.testing.assert_allclose(apply(op, x, y), wanted, rtol=1e-6)
    apply(op, x, np.float32(2.0).reshape(()))


def test_integers_stay_integers() -> None:
    out = apply("add", np.arange(TOKENS, dtype=np.int32), np.int32(2).reshape(()))
    assert out.dtype == np.int32
    assert apply("cast", out, dtype="f32").dtype == np.float32


@pytest.mark.parametrize(("kind", "torch_op"), [("mean", torch.mean), ("sum", torch.sum), ("max", torch.amax)])
@pytest.mark.parametrize("keepdim", [True, False])
def test_reduce(kind: str, torch_op: Callable[..., torch.Tensor], keepdim: bool) -> None:
    x = values(TOKENS, 3, 33)
    wanted = torch_op(torch.tensor(x), dim=-1, keepdim=keepdim).numpy()
    np.testing.assert_allclose(apply("reduce", x, kind=kind, axis=-1, keepdim=keepdim), wanted, rtol=1e-5, atol=1e-6)


def test_shapes() -> None:
    x = values(TOKENS, 6)
    np.testing.assert_array_equal(apply("reshape", x, shape=("T", 2, 3)), x.reshape(TOKENS, 2, 3))
    np.testing.assert_array_equal(apply("transpose", x, perm=(1, 0)), x.T)
    np.testing.assert_array_equal(apply("slice", x, axis=-1, start=1, stop=6, step=2), x[:, 1:6:2])
    np.testing.assert_array_equal(apply("concat", x, x[:, :2], axis=1), np.concatenate([x, x[:, :2]], axis=1))
    np.testing.assert_array_equal(apply("broadcast", x[:1], shape=("T", 6)), np.repeat(x[:1], TOKENS, axis=0))
    np.testing.assert_array_equal(apply("broadcast", x.reshape(TOKENS, 1, 6), shape=("T", 2, 6)), np.stack([x, x], 1))
    np.testing.assert_allclose(apply("matmul", x, values(6, 4)), x @ values(6, 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "types", "attrs", "message"),
    [
        ("add", ["f32[T,4]", "f32[T,3]"], {}, "do not broadcast: 4 against 3"),
        ("add", ["f32[T,4]", "f32[S,4]"], {}, "T against S"),
        ("mul", ["f32[T]", "i32[T]"], {}, "dtypes f32 and i32 differ"),
        ("exp", ["i32[T]"], {}, "exp is not defined for i32"),
        ("reduce", ["f32[T,4]"], {"kind": "mean", "axis": 0, "keepdim": True}, "mix tokens"),
        ("reduce", ["f32[T,4]"], {"kind": "median", "axis": 1, "keepdim": True}, "median"),
        ("reduce", ["f32[T,4]"], {"kind": "mean", "axis": 2, "keepdim": True}, "axis 2"),
        ("matmul", ["f32[4,T]", "f32[T,3]"], {}, "both must be one number"),
        ("reshape", ["f32[T,6]"], {"shape": ("T", 5)}, "another number of elements"),
        ("reshape", ["f32[T,6]"], {"shape": ("S", 6)}, "another number of elements"),
        ("transpose", ["f32[T,6]"], {"perm": (0, 0)}, "no permutation"),
        ("slice", ["f32[T,6]"], {"axis": 0, "start": 0, "stop": 1}, "mix tokens"),
        ("slice", ["f32[T,6]"], {"axis": 1, "start": 2, "stop": 7}, "no range"),
        ("concat", ["f32[T,6]", "f32[T,6]"], {"axis": 0}, "mix tokens"),
        ("concat", ["f32[T,6]", "f32[S,6]"], {"axis": 1}, "differ beside axis 1"),
        ("broadcast", ["f32[T,6]"], {"shape": ("T", 12)}, "6 against 12"),
        ("broadcast", ["f32[1,6]"], {"shape": ("S", 6)}, "S rows"),
    ],
)
def test_rules_refuse(op: str, types: list[str], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer(op, *types, **attrs)


# -- attention

ATTENTION = {"layer": 0, "scale": 0.3, "window": None, "softcap": None, "kv_heads": 2, "head_dim": 8, "v_dim": 8}


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_masked_softmax(window: int | None, softcap: float | None) -> None:
    """One sequence from the start, in traced form, against the formula written with PyTorch."""
    q, k, v = values(1, 6, TOKENS, 8), values(1, 2, TOKENS, 8), values(1, 2, TOKENS, 8) + 1
    context = StepContext(2, np.array([0, TOKENS]), np.array([TOKENS]), np.array([[4, 0, 2]], np.int32))
    context.kv[0] = KVCache(*(np.full((5, 2, 2, 8), np.nan, np.float32) for _ in "kv"))
    attrs = PRIMITIVES["attention"].attrs(**{**ATTENTION, "window": window, "softcap": softcap})
    (out,) = PRIMITIVES["attention"].reference(context, attrs, [q, k, v])
    keys, heads = (torch.tensor(x).repeat_interleave(3, dim=1) for x in (k, v))
    scores = torch.tensor(q) @ keys.transpose(2, 3) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    seen = torch.ones(TOKENS, TOKENS).tril() if window is None else torch.ones(TOKENS, TOKENS).tril().triu(1 - window)
    wanted = (scores.masked_fill(seen == 0, -torch.inf).softmax(-1) @ heads).transpose(1, 2)
    np.testing.assert_allclose(out, wanted.numpy(), atol=2e-6)
    np.testing.assert_array_equal(
        context.kv[0].keys[4, 1], k[0, :, 1]
    )  # position 1: first block of the table, second entry
    np.testing.assert_array_equal(context.kv[0].values[2, 0], v[0, :, 4])


def test_attention_agrees_with_the_plugins_that_replace_it() -> None:
    """Canonical form, two ragged sequences with a past: the primitive, and rope_cache followed by paged_attention."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(TOKENS, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    past = [rng.normal(size=(8, 4, 2, 8)).astype(np.float32) for _ in "kv"]
    results = []
    for split in (False, True):
        tables = np.array([[7, 1, 3], [0, 5, 2]], np.int32)
        context = StepContext(4, np.array([0, 4, 5]), np.array([6, 10]), tables)
        context.kv[1] = KVCache(past[0].copy(), past[1].copy())
        attrs = {**ATTENTION, "layer": 1, "window": 4, "softcap": 5.0}
        if split:
            shared = {"layer": 1, "heads": 6, "kv_heads": 2, "head_dim": 8}
            rope, paged = ALL["rope_cache"], ALL["paged_attention"]
            flat = [x.reshape(TOKENS, -1) for x in (q, k, v)]
            (turned,) = rope.reference(context, rope.attrs(**shared), flat)
            scaling = {name: attrs[name] for name in ("scale", "window", "softcap")}
            (out,) = paged.reference(context, paged.attrs(**shared, **scaling), [turned])
        else:
            (out,) = PRIMITIVES["attention"].reference(context, PRIMITIVES["attention"].attrs(**attrs), [q, k, v])
        results.append((out.reshape(TOKENS, -1), context.kv[1].keys))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-6)
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("types", "change", "message"),
    [
        (["f32[T,6,8]", "f32[T,2,8]", "f32[T,2,9]"], {}, r"expected.*f32\[T,2,8\]"),
        (["f32[T,5,8]", "f32[T,2,8]", "f32[T,2,8]"], {}, "5 heads are not a multiple of kv_heads=2"),
        (["f32[S,6,8]", "f32[S,2,8]", "f32[S,2,8]"], {}, "over T"),
        (["f32[T,6,8]"], {}, "expected q, k, v"),
    ],
)
def test_attention_rule_refuses(types: list[str], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer("attention", *types, **{**ATTENTION, **change})


def test_attention_rule_knows_both_forms() -> None:
    assert str(infer("attention", "f32[1,6,T,8]", "f32[1,2,T,8]", "f32[1,2,T,8]", **ATTENTION)) == "f32[1,T,6,8]"
    assert (
        str(infer("attention", "f32[T,6,8]", "f32[T,2,8]", "f32[T,2,4]", **{**ATTENTION, "v_dim": 4})) == "f32[T,6,4]"
    )
