"""SmoothQuant: the columns of an input are multiplied by factors, those of the weights that read it divided by them, so
that one scale a token suits all of its numbers.

Comes in: inputs, the weights that read them, a format. Goes out: factors, chosen by what rounding then costs. Must not
know: files, graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmc.calibration.formats import Format
from llmc.calibration.modelopt import Modelopt

#: What error compensation leaves of the cost of rounding weights to nearest (measured: 0.45 % perplexity of 1.5 %).
COMPENSATED = 0.35
#: Exponents that are tried beside not smoothing at all; the first is SmoothQuant's own.
_EXPONENTS = (0.5, 0.35, 0.65, 0.8)
#: Tokens that a choice is measured on.
_TOKENS = 128

#: x [T, K] as a module with weight [N, K] reads it.
Quantizer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def input_error(
    x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor | None, quantizer: Quantizer
) -> torch.Tensor:
    """[T, K]: what rounding changes in an input x; `factors` [K] multiply it before and divide it after."""
    return quantizer(x, weight) - x if factors is None else quantizer(x * factors, weight) / factors - x


def weight_error(weight: torch.Tensor, factors: torch.Tensor | None, form: Format) -> torch.Tensor:
    """[N, K]: what rounding to nearest changes in a weight; `factors` [K] divide it before and multiply it after."""
    if factors is None:
        return form.round(weight).weight - weight
    return form.round(weight / factors).weight * factors - weight


@dataclass(frozen=True)
class Smoother:
    """The factors of inputs. `quantizer`: how they are rounded afterwards."""

    modelopt: Modelopt
    form: Format
    quantizer: Quantizer

    def usual(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """SmoothQuant's own [K] for x [T, K] and one weight [N, K]."""
        return self._factors(x, self.modelopt.amax(weight, 1).flatten(), _EXPONENTS[0])

    def search(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[float, torch.Tensor] | None:
        """The exponent and the factors [K] with which the outputs of all weights [N, K] change least; None where they
        change least without.
        """
        columns = torch.stack([self.modelopt.amax(weight, 1).flatten() for weight in weights]).amax(0)
        some = x[:: max(len(x) // _TOKENS, 1)]
        best, least = None, self._cost(some, weights, None)
        for exponent in _EXPONENTS:
            factors = self._factors(x, columns, exponent)
            cost = self._cost(some, weights, factors)
            if cost < least:
                best, least = (exponent, factors), cost
        return best

    def _factors(self, x: torch.Tensor, columns: torch.Tensor, exponent: float) -> torch.Tensor:
        return self.modelopt.factors(self.modelopt.amax(x, 1).flatten(), columns, exponent)

    def _cost(self, x: torch.Tensor, weights: Sequence[torch.Tensor], factors: torch.Tensor | None) -> float:
        """The sum of squares of what rounding changes in the outputs."""
        total = 0.0
        for weight in weights:
            of_input = input_error(x, weight, factors, self.quantizer)
            of_weight = weight_error(weight, factors, self.form)
            total += float((of_input @ weight.T).square().sum() + COMPENSATED * (x @ of_weight.T).square().sum())
        return total
