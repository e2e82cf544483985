"""Rounds every linear weight of a model, one after the other, each for the inputs that the rounded ones before it give.

Comes in: a model, token ids, what was chosen for each module. Goes out: its rounded weight and its ranges.
Must not know: files, tables, how modules were chosen.

One forward pass carries all samples twice: as the unquantized model computes them, and as the engine will. When it
comes to a linear module, both inputs are at hand; the weight is rounded so that the second stream's output is as near
to the first's as it can, and the second goes on with it. So each weight is read once, and one layer's values are held.

The output head comes last and is far the largest: it is rounded in runs of rows, for the inputs of all tokens, and
nothing is multiplied with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.streamed import read_in_parts
from llmc.calibration.compensate import Hessian, compensate, fit_rows
from llmc.calibration.experts import Call, Experts, StackSink
from llmc.calibration.formats import Format, Rounded
from llmc.calibration.grid import static
from llmc.calibration.modules import by_outputs, head_path, plus_bias, replaced, row_blocks
from llmc.calibration.smooth import Smoother


@dataclass(frozen=True)
class Chosen:
    """`forms`: modules and what each is rounded to; `kept`: those of them that stay in bf16. `activations`: inputs are
    rounded with one scale a token, with one static scale, or none is; never the output head's, nor those of `inputs`.
    `experts`: modules of experts and what theirs are rounded to.
    """

    forms: Mapping[str, Format]
    kept: frozenset[str]
    activations: str
    inputs: frozenset[str] = frozenset()
    experts: Mapping[str, Format] = field(default_factory=dict)

    def input_rounding(self, path: str) -> str:
        """How the input of a module is rounded."""
        return "none" if path in self.inputs else self.activations


@dataclass(frozen=True)
class Outcome:
    """Of one module: magnitudes of its input and of its weight's rows f32[N], the static scale of its input (0: it has
    none), and the relative error of its rounded weight (root mean squares), 0 where it stays in bf16. Where the input
    is `smoothed`, the rounded weight is that divided by the factors.
    """

    input_amax: float
    weight_amax: torch.Tensor
    input_scale: float
    error: float
    smoothed: Smoothed | None = None


@dataclass(frozen=True)
class Smoothed:
    """An input is multiplied by `factors` [K], of this exponent; `module` is the first that reads it so."""

    module: str
    exponent: float
    factors: torch.Tensor


@dataclass(frozen=True)
class Smoothing:
    """How inputs are smoothed. `readers`: of each module those that read its input and are rounded."""

    smoother: Smoother
    readers: Mapping[str, tuple[str, ...]]

    def of(self, path: str, x: torch.Tensor, modules: Mapping[str, nn.Module]) -> Smoothed | None:
        """For the input x [T, K] that module `path` reads."""
        readers = self.readers.get(path, ())
        found = self.smoother.search(x, [by_outputs(modules[reader]) for reader in readers]) if readers else None
        return None if found is None else Smoothed(readers[0], *found)


class Sink(StackSink, Protocol):
    """Where results go."""

    def rows(self, path: str, start: int, rounded: Rounded) -> None:
        """Rounded rows of a module's weight, from that one on."""

    def done(self, path: str, outcome: Outcome) -> None:
        """The module is done."""


#: The largest magnitude of a tensor, over all of it or, with axis 0, of each row.
Amax = Callable[[torch.Tensor, int | None], torch.Tensor]


def round_model(
    model: Any,
    samples: Sequence[Sequence[int]],
    chosen: Chosen,
    amax: Amax,
    sink: Sink,
    smoothing: Smoothing | None = None,
) -> None:
    """Rounds what is chosen, and tells `sink` of each module."""
    longest = max(map(len, samples))
    ids = torch.zeros((len(samples), longest), dtype=torch.long)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample)] = torch.tensor(list(sample))
    real = torch.arange(longest)[None] < torch.tensor([len(sample) for sample in samples])[:, None]
    modules = {path: model.get_submodule(path) for path in chosen.forms}
    experts = {path: model.get_submodule(path) for path in chosen.experts}
    head = head_path(model)
    streams = _Streams(modules | experts, real.flatten(), chosen, amax, sink, head, smoothing)
    with (
        torch.inference_mode(),
        replaced(modules, streams.forward),
        replaced(experts, streams.experts),
        read_in_parts(experts.values()),
    ):
        model(ids.repeat(2, 1), use_cache=False, logits_to_keep=0 if head in chosen.forms else 1)


class _Input:
    """What the modules that read one input share: of `exact` and `given` [T, K] its range and static scale, how it is
    smoothed, and `seen`, what the engine multiplies of the given.
    """

    def __init__(self, path: str, exact: torch.Tensor, given: torch.Tensor, streams: _Streams) -> None:
        self._streams, form = streams, streams.chosen.forms[path]
        weight = by_outputs(streams.modules[path])
        self._hessian: Hessian | None = None
        rows = streams.tokens(exact)
        self.amax = float(streams.amax(rows, None))
        self.scale = form.input_scale(rows[:: max(len(rows) // 512, 1)], self.amax, weight.square().mean(0))
        self.smoothed = None
        if streams.smoothing is not None:
            self.smoothed = streams.smoothing.of(path, streams.tokens(given), streams.modules)
        self.seen = given if self.smoothed is None else given * self.smoothed.factors
        rounding = streams.chosen.input_rounding(path)
        if rounding == "static":
            self.seen = static(self.seen, self.scale)
        elif rounding == "token":
            self.seen = form.per_token(self.seen)

    def hessian(self) -> Hessian:
        if self._hessian is None:
            self._hessian = Hessian(self._streams.tokens(self.seen))
        return self._hessian


class _Streams:
    """The forwards of linear modules while both streams pass."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        real: torch.Tensor,
        chosen: Chosen,
        amax: Amax,
        sink: Sink,
        head: str | None,
        smoothing: Smoothing | None,
    ) -> None:
        self.modules, self.real, self.chosen, self.amax, self._sink = modules, real, chosen, amax, sink
        self.head, self.smoothing = head, smoothing
        self._last: torch.Tensor | None = None
        self._input: _Input | None = None

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, K] that are tokens, not padding: x itself, if all are."""
        return x if self.real.all() else x[self.real]

    def forward(self, path: str, x: torch.Tensor) -> torch.Tensor:
        module = self.modules[path]
        if path == self.head:
            return self._head(path, module, x)
        weight = by_outputs(module)
        rows, columns = weight.shape
        if x.numel() != 2 * len(self.real) * columns:
            return self._routed(path, module, weight, x)
        exact, given = x.reshape(2, len(self.real), columns)
        if self._input is None or x is not self._last:
            self._last, self._input = x, None  # the old input's memory first
            self._input = _Input(path, exact, given, self)
        shared = self._input
        y = x.new_empty((2, len(self.real), rows))
        torch.mm(exact, weight.T, out=y[0])
        rounded = None
        if path in self.chosen.kept:
            torch.mm(given, weight.to(torch.bfloat16).float().T, out=y[1])
        else:
            rounded = self._round(path, weight, shared, y)
        self._tell(path, weight, shared.amax, shared.scale, rounded, None if rounded is None else shared.smoothed)
        return plus_bias(module, y.view(*x.shape[:-1], rows))

    def _tell(
        self,
        path: str,
        weight: torch.Tensor,
        input_amax: float,
        input_scale: float,
        rounded: Rounded | None,
        smoothed: Smoothed | None = None,
    ) -> None:
        error = 0.0
        if rounded is not None:
            value = rounded.weight if smoothed is None else rounded.weight * smoothed.factors
            error = float((value - weight).norm() / weight.norm().clamp_min(1e-30))
            self._sink.rows(path, 0, rounded)
        self._sink.done(path, Outcome(input_amax, self.amax(weight, 0).flatten(), input_scale, error, smoothed))

    def _head(self, path: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """All tokens' inputs are here. Logits would be the largest tensor of all, and nobody reads them: one column of
        zeros stands for them.
        """
        exact, given = map(self.tokens, x.reshape(2, len(self.real), -1))
        hessian = None if path in self.chosen.kept else Hessian(given)
        amax, lost, whole = list[torch.Tensor](), 0.0, 1e-30
        for rows, weight in row_blocks(module):
            amax.append(self.amax(weight, 0).flatten())
            if hessian is not None:
                rounded = compensate(weight, hessian, self.chosen.forms[path])
                self._sink.rows(path, rows.start, rounded)
                lost += float((rounded.weight - weight).square().sum())
                whole += float(weight.square().sum())
        error = math.sqrt(lost / whole)
        self._sink.done(path, Outcome(float(self.amax(exact, None)), torch.cat(amax), 0.0, error))
        return x.new_zeros((*x.shape[:-1], 1))

    def _round(self, path: str, weight: torch.Tensor, shared: _Input, y: torch.Tensor) -> Rounded:
        """The rounded weight; y[1] becomes what it makes of the given input, y[0] is what it should make of it."""
        smoothed = weight if shared.smoothed is None else weight / shared.smoothed.factors
        rounded = compensate(smoothed, shared.hessian(), self.chosen.forms[path])
        torch.mm(shared.seen, rounded.weight.T, out=y[1])
        fitted = fit_rows(rounded, self.tokens(y[0]), self.tokens(y[1]))
        y[1] *= (fitted.scale / rounded.scale)[:, 0]
        return fitted

    def _routed(self, path: str, module: nn.Module, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A module that sees some of the tokens, of either stream: rounded to nearest, and exact in both streams."""
        rounded = None if path in self.chosen.kept else self.chosen.forms[path].round(weight)
        amax = float(self.amax(x, None))
        input_scale = self.chosen.forms[path].input_scale(
            x.reshape(-1, x.shape[-1])[:512], amax, weight.square().mean(0)
        )
        self._tell(path, weight, amax, input_scale, rounded)
        return plus_bias(module, x @ weight.T)

    def experts(
        self, path: str, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[2T, H], of a module of experts: it is called with hidden states [2T, H] and, each [2T, k], what tokens chose
        and how much that weighs. Each stream routes its own tokens.
        """
        if len(hidden_states) != 2 * len(self.real):
            raise UnsupportedError(
                f"{path}: its experts are called with {len(hidden_states)} of {2 * len(self.real)} tokens, and "
                "calibration rounds them for all; build with --dtype bf16"
            )
        module, form = self.modules[path], self.chosen.experts[path]
        hidden, index, mix = (x.chunk(2) for x in (hidden_states, top_k_index, top_k_weights))
        exact, given = (Call(hidden[n], index[n], mix[n], self.real) for n in (0, 1))
        experts = Experts(path, module, form, self.chosen.activations, self.amax)
        return torch.cat([experts.exact(exact), experts.rounded(given, self._sink)])
