"""Rounds the experts of a layer, each for the tokens that the router sends to it.

Comes in: an experts module of transformers' experts interface, and what it is called with in both streams (see
`sequential.py`). Goes out: each expert's rounded matrices, the layer's output in both streams. Must not know: routers,
files, families.

An expert may see few of the calibration's tokens, or none. So some tokens of the layer are sent to every expert beside
its own, with the weight of `_PRIOR` tokens in all: an expert that nobody chose is rounded for these alone. One expert's
matrices are held at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from llmc.builder.streamed import parameter_part
from llmc.calibration.compensate import Hessian, compensate
from llmc.calibration.formats import Format, Rounded
from llmc.calibration.grid import static

#: What the layer's tokens count beside an expert's own, and how many of them are taken.
_PRIOR, _SHARED = 32, 256
#: Rows of inputs that a static scale is found from.
_SCALED = 512


def expert_modules(model: Any) -> dict[str, nn.Module]:
    """Path -> module of those whose experts are one tensor each of gates, ups and downs."""
    noted = ("has_gate", "is_transposed")
    return {path: module for path, module in model.named_modules() if all(hasattr(module, n) for n in noted)}


def stack_names(module: Any) -> tuple[str, str]:
    """The parameters of an experts module: before and after the activation."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def stack_shape(module: Any, name: str) -> tuple[int, int, int]:
    """[E, N, K] of one of them, by outputs."""
    experts, rows, columns = module.get_parameter(name).shape
    return (experts, columns, rows) if module.is_transposed else (experts, rows, columns)


def stack_shapes(modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """The same of all of these modules, by paths of parameters."""
    return {f"{path}.{name}": stack_shape(m, name) for path, m in modules.items() for name in stack_names(m)}


@dataclass(frozen=True)
class Call:
    """What an experts module is called with in one stream: hidden states [T, H], the experts that each token chose
    [T, k] and what they weigh [T, k]. `real` [T]: which tokens are no padding.
    """

    hidden: torch.Tensor
    index: torch.Tensor
    mix: torch.Tensor
    real: torch.Tensor

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [n] that chose the expert, and what it weighs for each."""
        tokens, places = (self.index == expert).nonzero(as_tuple=True)
        return tokens, self.mix[tokens, places]

    def some(self, count: int) -> torch.Tensor:
        """Hidden states of at most about `count` tokens, spread over all."""
        hidden = self.hidden[self.real]
        return hidden[:: max(-(-len(hidden) // count), 1)]


class StackSink(Protocol):
    """Where results go."""

    def expert(self, path: str, number: int, rounded: Rounded) -> None:
        """One expert's matrix of the stack with this path."""

    def stack(self, path: str, stack: Stack) -> None:
        """The stack is done."""


@dataclass
class Stack:
    """One parameter of all experts. `input_amax`, `input_scale` (of static activations; 0: none): of what its matrices
    multiply; `weight_amax`: the largest magnitude of each matrix.
    """

    path: str
    module: Any
    name: str
    form: Format
    input_amax: float = 0.0
    input_scale: float = 0.0
    weight_amax: list[float] = field(default_factory=list)
    _lost: float = 0.0
    _whole: float = 1e-30

    @property
    def error(self) -> float:
        """Root mean square of what rounding changed / of the weights."""
        return math.sqrt(self._lost / self._whole)

    def weight(self, expert: int) -> torch.Tensor:
        """f32[N, K]"""
        weight = parameter_part(self.module, self.name, expert)
        return weight.T.contiguous() if self.module.is_transposed else weight

    def plus_bias(self, expert: int, y: torch.Tensor) -> torch.Tensor:
        """The expert's output from its product."""
        return y + parameter_part(self.module, f"{self.name}_bias", expert) if self.module.has_bias else y

    def rounded(self, weight: torch.Tensor, inputs: torch.Tensor) -> Rounded:
        """The matrix, rounded for these inputs [T, K]."""
        rounded = compensate(weight, Hessian(inputs), self.form)
        self._lost += float((rounded.weight - weight).square().sum())
        self._whole += float(weight.square().sum())
        return rounded


class Experts:
    """The experts of one layer. `activations` token|static|none: how the engine rounds what they multiply."""

    def __init__(
        self,
        path: str,
        module: Any,
        form: Format,
        activations: str,
        amax: Callable[[torch.Tensor, int | None], torch.Tensor],
    ) -> None:
        self._module, self._form, self._activations, self._amax = module, form, activations, amax
        self._stacks = [Stack(f"{path}.{name}", module, name, form) for name in stack_names(module)]
        self._count = stack_shape(module, stack_names(module)[0])[0]

    def exact(self, call: Call) -> torch.Tensor:
        """[T, H] as the unquantized model computes it; ranges and static scales are found on the way."""
        out = torch.zeros_like(call.hidden)
        seen: list[list[torch.Tensor]] = [[], []]
        cost: list[torch.Tensor | float] = [0.0, 0.0]
        for expert in range(self._count):
            tokens, mix = call.of(expert)
            x, real = call.hidden[tokens], call.real[tokens]
            for number, stack in enumerate(self._stacks):
                weight = stack.weight(expert)
                stack.weight_amax.append(float(self._amax(weight, None)))
                cost[number] += weight.square().mean(0)
                if real.any():
                    stack.input_amax = max(stack.input_amax, float(self._amax(x[real], None)))
                    seen[number].append(x[real][: max(_SCALED // self._count, 1)])
                x = stack.plus_bias(expert, x @ weight.T)
                x = self._between(x) if number == 0 else self._after(x)
            out.index_add_(0, tokens, x * mix[:, None])
        for stack, rows, weighs in zip(self._stacks, seen, cost, strict=True):
            if rows:
                stack.input_scale = self._form.input_scale(torch.cat(rows), stack.input_amax, torch.as_tensor(weighs))
        return out

    def rounded(self, call: Call, sink: StackSink) -> torch.Tensor:
        """[T, H] as the engine will compute it; after `exact`."""
        out, shared = torch.zeros_like(call.hidden), call.some(_SHARED)
        for expert in range(self._count):
            tokens, mix = call.of(expert)
            counts = torch.cat([call.real[tokens].float(), torch.full((len(shared),), _PRIOR / len(shared))])
            x = torch.cat([call.hidden[tokens], shared])
            for number, stack in enumerate(self._stacks):
                seen = self._seen(x, stack)
                rounded = stack.rounded(stack.weight(expert), seen * counts.sqrt()[:, None])
                sink.expert(stack.path, expert, rounded)
                x = stack.plus_bias(expert, seen @ rounded.weight.T)
                x = self._between(x) if number == 0 else self._after(x[: len(tokens)])
            out.index_add_(0, tokens, x * mix[:, None])
        for stack in self._stacks:
            sink.stack(stack.path, stack)
        return out

    def _seen(self, x: torch.Tensor, stack: Stack) -> torch.Tensor:
        """What the engine multiplies of x [T, K]."""
        if self._activations == "static":
            return static(x, stack.input_scale)
        return self._form.per_token(x) if self._activations == "token" else x

    def _between(self, wide: torch.Tensor) -> torch.Tensor:
        """What the second matrix multiplies, of what the first gives [T, N]."""
        result: torch.Tensor = self._module._apply_gate(wide) if self._module.has_gate else self._module.act_fn(wide)
        return result

    def _after(self, y: torch.Tensor) -> torch.Tensor:
        """What is weighed and added up, of what the second matrix gives [T, H]."""
        return self._module.post_expert_norm(y) if getattr(self._module, "has_post_expert_norm", False) else y
