"""The names of the elementwise primitives, for the passes that treat all of them alike."""

from __future__ import annotations

ACTIVATIONS = frozenset({"relu", "sigmoid", "silu", "gelu", "gelu_tanh", "tanh"})
UNARY = ACTIVATIONS | {"neg", "exp", "log", "cos", "sin", "sqrt", "rsqrt", "erf", "abs", "square", "reciprocal"}
BINARY = frozenset({"add", "sub", "mul", "div", "pow", "maximum", "minimum"})
ELEMENTWISE = UNARY | BINARY
