"""From the operators of `recurrent_hook` to plug-ins: tokens come first and heads stand side by side.

Comes in: an `Emitter` and a traced node's arguments. Goes out: `TABLE`. Must not know: model families.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from llmc.artifacts.types import Dim
from llmc.builder.operators import ALL
from llmc.builder.trace.emitter import Emitter, Name, Value
from llmc.builder.trace.shapes import reshape
from llmc.builder.trace.table import Table, entering

TABLE: Table = {}
enter = entering(TABLE)


def _state(e: Emitter) -> int:
    """The number of the next state: states are numbered in the order of the graph."""
    return sum(ALL[node.op].state_shape is not None for node in e.nodes)


def _rows(e: Emitter, value: Value, last: bool = False) -> Name:
    """[1,T,..] as [T,columns]; `last`: tokens are the last of three axes."""
    x = e.value(value)
    if last:
        x = e.emit("transpose", [x], f"{x}.rows", perm=(0, 2, 1))
    batch, tokens, *columns = e.types[x].shape
    if batch != 1 or tokens != "T":
        raise e.unsupported(f"it runs over {e.types[x]}, not over the tokens of a step")
    return reshape(e, x, ("T", prod(_numbers(columns))), f"{x}.flat")


def _numbers(dims: Sequence[Dim]) -> list[int]:
    assert not any(isinstance(d, str) for d in dims)
    return [int(d) for d in dims]


def _back(e: Emitter, y: Name, last: bool = False) -> Name:
    """[T,columns] in the shape that the tracer found."""
    assert e.at is not None
    shape = e.kind(e.at).shape
    if not last:
        return reshape(e, y, shape)
    return e.emit("transpose", [reshape(e, y, (1, "T", shape[1]), f"{y}.rows")], perm=(0, 2, 1))


def _optional(e: Emitter, value: Value | None) -> list[Name]:
    return [] if value is None else [e.value(value)]


@enter("llmc.causal_conv")
def _causal_conv(e: Emitter, x: Value, weight: Value, bias: Value | None, activation: str | None) -> Value:
    w = e.value(weight)
    channels, taps = _numbers(e.types[w].shape)
    attrs: dict[str, Any] = {"channels": channels, "taps": taps, "bias": bias is not None, "activation": activation}
    inputs = [_rows(e, x, last=True), w, *_optional(e, bias)]
    return _back(e, e.emit("causal_conv", inputs, state=_state(e), **attrs), last=True)


@enter("llmc.ssd_scan")
def _ssd_scan(e: Emitter, x: Value, dt: Value, a: Value, b: Value, c: Value, d: Value | None) -> Value:
    _, _, heads, head_dim = e.types[e.value(x)].shape
    _, _, groups, state_size = e.types[e.value(b)].shape
    inputs = [*(_rows(e, value) for value in (x, b, c, dt)), e.value(a), *_optional(e, d)]
    attrs: dict[str, Any] = {
        "heads": heads,
        "head_dim": head_dim,
        "groups": groups,
        "state_size": state_size,
        "skip": d is not None,
    }
    return _back(e, e.emit("ssd_scan", inputs, state=_state(e), **attrs))


@enter("llmc.selective_scan")
def _selective_scan(e: Emitter, x: Value, dt: Value, a: Value, b: Value, c: Value, d: Value | None) -> Value:
    rates = e.value(a)
    channels, state_size = e.types[rates].shape
    inputs = [*(_rows(e, value, last=True) for value in (x, b, c, dt)), rates, *_optional(e, d)]
    attrs: dict[str, Any] = {"channels": channels, "state_size": state_size, "skip": d is not None}
    return _back(e, e.emit("selective_scan", inputs, state=_state(e), **attrs), last=True)


@enter("llmc.gated_delta")
def _gated_delta(e: Emitter, q: Value, k: Value, v: Value, g: Value, beta: Value, scale: float,
                 normalize: bool) -> Value:  # fmt: skip
    _, _, key_heads, key_dim = e.types[e.value(k)].shape
    _, _, heads, value_dim = e.types[e.value(v)].shape
    attrs: dict[str, Any] = {"heads": heads, "key_heads": key_heads, "key_dim": key_dim, "value_dim": value_dim}
    per_key = e.types[e.value(g)].rank == 4
    inputs = [_rows(e, value) for value in (q, k, v, g, beta)]
    out = e.emit("gated_delta", inputs, state=_state(e), scale=scale, normalize=normalize, per_key=per_key, **attrs)
    return _back(e, out)
