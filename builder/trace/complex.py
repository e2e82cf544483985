"""From ATen operators on complex numbers to primitives: a complex value is two real ones.

Comes in: an `Emitter` and a traced node's arguments. Goes out: `TABLE`, `is_complex`. Must not know: families.
Rotary embeddings are written with complex numbers in some models: e^(i angle) times pairs of columns.
"""

from __future__ import annotations

from typing import Any

import torch

from llmc.builder.trace.emitter import Complex, Emitter, Name
from llmc.builder.trace.shapes import cut, reshape

#: By the operator's name; these get and return `Complex` values where the model has complex tensors.
TABLE: dict[str, Any] = {}


def is_complex(node: torch.fx.Node, arguments: dict[str, Any]) -> bool:
    """Whether a traced node returns a complex tensor or is given one."""
    value = node.meta.get("val")
    made = isinstance(value, torch.Tensor) and value.is_complex()
    return made or any(isinstance(a, Complex) for a in arguments.values())


def _enter(*names: str) -> Any:
    def keep(translation: Any) -> Any:
        TABLE.update(dict.fromkeys(names, translation))
        return translation

    return keep


@_enter("polar")
def _polar(e: Emitter, abs: Any, angle: Any) -> Complex:
    size, turn = e.value(abs), e.value(angle)
    return Complex(e.emit("mul", [size, e.emit("cos", [turn])]), e.emit("mul", [size, e.emit("sin", [turn])]))


@_enter("view_as_complex")
def _view_as_complex(e: Emitter, self: Any) -> Complex:
    """[..., n, 2] -> [..., n]: pairs of neighbours, read from the columns in order where a view has paired them."""
    x = e.value(self)
    shape = e.types[x].shape
    pairs, size = shape[:-1], shape[-2]
    if not isinstance(size, int):
        raise e.unsupported("it pairs the tokens")
    flat = reshape(e, x, (*shape[:-2], 2 * size), f"{x}.pairs")
    axis = len(shape) - 2
    real, imag = (cut(e, flat, axis, start, 2 * size, 2) for start in (0, 1))
    assert e.types[real].shape == pairs
    return Complex(real, imag)


@_enter("view_as_real")
def _view_as_real(e: Emitter, self: Complex) -> Name:
    shape = (*e.types[self.real].shape, 1)
    parts = [reshape(e, part, shape) for part in (self.real, self.imag)]
    return e.emit("concat", parts, axis=len(shape) - 1)


@_enter("mul")
def _mul(e: Emitter, self: Any, other: Any) -> Complex:
    if not isinstance(self, Complex):
        self, other = other, self
    if not isinstance(other, Complex):
        return Complex(_scaled(e, self.real, other), _scaled(e, self.imag, other))

    def times(a: Name, b: Name) -> Name:
        return e.emit("mul", [a, b])

    real = e.emit("sub", [times(self.real, other.real), times(self.imag, other.imag)])
    return Complex(real, e.emit("add", [times(self.imag, other.real), times(self.real, other.imag)]))


def _scaled(e: Emitter, part: Name, factor: Any) -> Name:
    operand = e.scalar(factor, "f32") if isinstance(factor, int | float) else e.value(factor)
    return e.emit("mul", [part, operand])


@_enter("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view")
def _view(e: Emitter, self: Complex, **options: Any) -> Complex:
    assert e.at is not None
    shape = e.shape(e.at.meta["val"])
    return Complex(reshape(e, self.real, shape), reshape(e, self.imag, shape))


@_enter("to", "_to_copy", "clone", "contiguous", "alias", "detach")
def _same(e: Emitter, self: Complex, **options: Any) -> Complex:
    return self
