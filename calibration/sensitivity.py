"""What rounding costs in each linear module alone, and which modules are kept in bf16 for it.

Comes in: a model, token ids, a budget. Goes out: nats a token by module; the modules that are kept, and those whose
inputs are. Must not know: how weights are rounded in the end.

To second order the divergence from the unquantized model is half the expected square of the change of log p(label) over
labels that the model itself draws (the Fisher information). One backward pass gives the gradient g at each module's
output; an output error e costs half the mean over tokens of (g e)^2. Errors of different modules are taken as
independent, which rounding errors nearly are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from llmc.builder.reference import pass_tokens
from llmc.calibration.formats import Format
from llmc.calibration.grid import static
from llmc.calibration.modules import by_outputs, head_path, plus_bias, replaced, row_blocks, shape_of
from llmc.calibration.smooth import COMPENSATED, Quantizer, Smoother, input_error, weight_error

#: What error compensation leaves of the cost of rounding an output head to nearest (measured: KL 0.0011 of 0.032): far
#: less than of other layers.
_COMPENSATED_HEAD = 0.035


def quantizer(activations: str, form: Format) -> Quantizer:
    """For activations token|static|none. A static scale is found from the tokens at hand, as calibration finds it."""

    def with_static_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return static(x, form.input_scale(x, float(x.abs().max()), weight.square().mean(0)))

    if activations == "none":
        return lambda x, weight: x
    return with_static_scale if activations == "static" else lambda x, weight: form.per_token(x)


@dataclass
class Sensitivity:
    """`loss`: nats a token by module path; `units`: modules that are kept or not together; `forms`: what the others
    are rounded to; `readers`: of each module that ran, those that read its input; `input_loss`: the part of `loss` that
    rounding a module's input costs.
    """

    loss: dict[str, float]
    units: list[tuple[str, ...]]
    shapes: dict[str, tuple[int, int]]
    forms: Mapping[str, Format]
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    input_loss: dict[str, float] = field(default_factory=dict)

    def kept(self, budget: float) -> frozenset[str]:
        """The modules to keep in bf16 so that all of them take at most `budget` times the bytes that they take if none
        is kept: those that cost most for the bytes that keeping them adds.
        """
        small = {path: self.forms[path].nbytes(*shape) for path, shape in self.shapes.items()}
        added = {path: 2 * rows * columns - small[path] for path, (rows, columns) in self.shapes.items()}
        room, kept = (budget - 1) * sum(small.values()), set[str]()

        def gain(unit: tuple[str, ...]) -> float:
            return sum(self.loss[path] for path in unit) / sum(added[path] for path in unit)

        for unit in sorted(self.units, key=lambda unit: (-gain(unit), unit)):
            cost = sum(added[path] for path in unit)
            if cost <= room and gain(unit) > 0:
                kept.update(unit)
                room -= cost
        return frozenset(kept)

    def rounded_readers(self, kept: frozenset[str]) -> dict[str, tuple[str, ...]]:
        """`readers` without those that are kept; inputs that nothing else reads are left out."""
        rounded = {path: tuple(r for r in readers if r not in kept) for path, readers in self.readers.items()}
        return {path: readers for path, readers in rounded.items() if readers}

    def kept_inputs(self, kept: frozenset[str], share: float) -> frozenset[str]:
        """The modules, among those whose weights are rounded, whose inputs are not to be: all that read an input or
        none, together at most `share` of the multiplications of all modules. Those whose inputs cost most for the
        multiplications.
        """
        size = {path: rows * columns for path, (rows, columns) in self.shapes.items()}
        room, found = share * sum(size.values()), set[str]()

        def gain(readers: tuple[str, ...]) -> float:
            return sum(self.input_loss.get(path, 0.0) for path in readers) / sum(size[path] for path in readers)

        groups = set(self.rounded_readers(kept).values())
        for readers in sorted(groups, key=lambda readers: (-gain(readers), readers)):
            cost = sum(size[path] for path in readers)
            if cost <= room and gain(readers) > 0:
                found.update(readers)
                room -= cost
        return frozenset(found)


def measure(
    model: Any,
    samples: Sequence[Sequence[int]],
    forms: Mapping[str, Format],
    quantizer: Quantizer,
    seed: int,
    done: Callable[[int, int], None],
    smoother: Smoother | None = None,
) -> Sensitivity:
    """Of the modules that `forms` names, with a `smoother` behind inputs smoothed as is usual. Runs the samples forward
    and backward, a few at a time. Memory: one layer's activations, each layer's input, and the logits.
    """
    batches = _batches(samples, pass_tokens(model))
    modules = {path: model.get_submodule(path) for path in forms}
    record = _Record(modules, forms, quantizer, head_path(model), smoother)
    generator = torch.Generator().manual_seed(seed)
    with replaced(modules, record.forward), _recomputed_layers(model), _differentiable(model.get_input_embeddings()):
        for count, batch in enumerate(batches, 1):
            _backward(model(torch.tensor(batch), use_cache=False).logits.flatten(0, 1), generator)
            done(count, len(batches))
    tokens = sum(map(len, samples))
    loss, input_loss = (
        {path: squares.get(path, 0.0) / tokens / 2 for path in modules}
        for squares in (record.squares, record.input_squares)
    )
    shapes = {path: shape_of(module) for path, module in modules.items()}
    return Sensitivity(loss, _units(record.groups, modules), shapes, forms, _readers(record.groups), input_loss)


def _readers(groups: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Of each module the modules that read its input: a layer that runs again, for its gradients, may not run to its
    end, so the largest group counts.
    """
    readers: dict[str, tuple[str, ...]] = {}
    for group in sorted(groups, key=len):
        readers |= dict.fromkeys(group, tuple(dict.fromkeys(group)))
    return readers


def _backward(logits: torch.Tensor, generator: torch.Generator) -> None:
    """Gradients of the log probability of labels that `logits` [T, V] themselves are asked for: one-hot less
    probabilities, written down so that no more than logits and gradient is held.
    """
    gradient = logits.detach().softmax(-1)
    labels = torch.multinomial(gradient, 1, generator=generator)
    gradient.neg_().scatter_add_(1, labels, torch.ones_like(labels, dtype=gradient.dtype))
    logits.backward(gradient)


def _batches(samples: Sequence[Sequence[int]], tokens: int) -> list[list[Sequence[int]]]:
    """Samples of one length together, at most `tokens` tokens of them: padding would be measured too."""
    batches: list[list[Sequence[int]]] = []
    for length, group in groupby(sorted(samples, key=len), key=len):
        alike, size = list(group), max(tokens // length, 1)
        batches += (alike[at : at + size] for at in range(0, len(alike), size))
    return batches


def _units(groups: Sequence[Sequence[str]], modules: Mapping[str, nn.Module]) -> list[tuple[str, ...]]:
    """Gate and up of a gated product stay together: one kernel computes both. They are the two modules of one shape
    that read one input and widen it.
    """
    units, seen = list[tuple[str, ...]](), set[str]()
    for group in groups:
        wide = [p for p in group if shape_of(modules[p])[0] > shape_of(modules[p])[1]]
        if len(wide) == 2 and not seen & set(wide) and shape_of(modules[wide[0]]) == shape_of(modules[wide[1]]):
            units.append(tuple(wide))
            seen.update(wide)
    return units + [(path,) for path in modules if path not in seen]


@dataclass
class _Record:
    """What the backward pass finds."""

    modules: Mapping[str, nn.Module]
    forms: Mapping[str, Format]
    quantizer: Quantizer
    head: str | None
    smoother: Smoother | None = None
    squares: dict[str, float] = field(default_factory=dict)
    input_squares: dict[str, float] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    _last: torch.Tensor | None = None

    def forward(self, path: str, x: torch.Tensor) -> torch.Tensor:
        module = self.modules[path]
        if x is not self._last:
            self._last = x
            self.groups.append([])
        self.groups[-1].append(path)
        y: torch.Tensor = _Measured.apply(x, self, path)
        return plus_bias(module, y)

    def note(self, path: str, x: torch.Tensor, gradient: torch.Tensor, back: torch.Tensor) -> None:
        """x [T, K], the gradients at the output [T, N] and at the input [T, K]."""
        module, form, of_weight = self.modules[path], self.forms[path], x.new_zeros(len(x))
        smooths = self.smoother is not None and path != self.head
        factors = self.smoother.usual(x, by_outputs(module)) if self.smoother and smooths else None
        for rows, weight in row_blocks(module):
            of_weight += ((x @ weight_error(weight, factors, form).T) * gradient[:, rows]).sum(-1)
        squares = float((_COMPENSATED_HEAD if path == self.head else COMPENSATED) * of_weight.square().sum())
        if path != self.head:  # which reads its input as it is
            of_input = input_error(x, by_outputs(module), factors, self.quantizer)
            input_squares = float((of_input * back).sum(-1).square().sum())
            self.input_squares[path] = self.input_squares.get(path, 0.0) + input_squares
            squares += input_squares
        self.squares[path] = self.squares.get(path, 0.0) + squares


class _Measured(torch.autograd.Function):
    """A product whose backward pass tells what an error of it would cost; the weight is read again for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, record: _Record, path: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.record, ctx.path = record, path
        module = record.modules[path]
        y = x.new_empty((*x.shape[:-1], shape_of(module)[0]))
        for rows, weight in row_blocks(module):
            y[..., rows] = x @ weight.T
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        back = torch.zeros_like(x)
        for rows, weight in row_blocks(ctx.record.modules[ctx.path]):
            back += gradient[..., rows] @ weight
        ctx.record.note(ctx.path, x.flatten(0, -2), gradient.flatten(0, -2), back.flatten(0, -2))
        return back, None, None


@contextlib.contextmanager
def _differentiable(embedding: nn.Module) -> Iterator[None]:
    """Inside, gradients go back to what this module returns; no parameter needs one."""
    # A copy, because some models scale what they looked up in place.
    hook = embedding.register_forward_hook(lambda module, args, y: y.detach().requires_grad_().clone())
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _recomputed_layers(model: Any) -> Iterator[None]:
    """Inside, each decoder layer keeps its input alone and runs again for its gradients."""
    layers = [layer for stack in _stacks(model) for layer in stack]
    for layer in layers:
        layer.forward = _recomputing(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost lists of modules: a decoder's layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _stacks(child)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: recompute(forward, *args, use_reentrant=False, **kwargs)
