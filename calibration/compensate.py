"""Error-compensated rounding of one weight: what rounding a column loses, the columns behind it make up for.

Comes in: a weight, the inputs that it will see, a format. Goes out: the rounded weight. Must not know: models, files.

GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns in descending order of their input's energy, each rounded to
nearest, its error spread over the rest by the inverse Hessian. Only what rounding loses is made up for: to fit also the
drift that earlier layers and rounded activations bring (GPTAQ's asymmetric objective) learns the noise of the few
thousand tokens that calibration has; on other text it was four times worse (SmolLM2, KL of weights alone).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmc.calibration.formats import E4m3, Format, Grid, Rounded

#: Added to the Hessian's diagonal, times the mean of it: directions that calibration hardly saw are not trusted.
DAMPING = 0.02
_BLOCK = 64
#: Tokens of which copies are made at once.
_TOKENS = 512


class Hessian:
    """The second moment of an input, [K, K], factored: everything that the weights which read this input share.

    The factors are made one over the other, so that no more than one such matrix is ever held: of 8192 columns it has
    268 MB.
    """

    def __init__(self, inputs: torch.Tensor) -> None:
        """`inputs` f32[T, K]; the moment is the mean of x x^T over the T tokens."""
        energy = torch.stack([part.square().sum(0) for part in inputs.split(_TOKENS)]).sum(0) / len(inputs)
        self.order = torch.argsort(energy, descending=True, stable=True)
        moment = inputs.new_zeros((inputs.shape[1], inputs.shape[1]))
        for part in inputs.split(_TOKENS):
            ordered = part[:, self.order]
            moment.addmm_(ordered.T, ordered)
        moment /= len(inputs)
        moment.diagonal().add_(float(DAMPING * energy.mean()) if energy.any() else 1.0)
        factor = moment.mT  # by columns, as LAPACK works in place
        torch.linalg.cholesky(factor, out=factor)
        torch.cholesky_inverse(factor, out=factor)
        #: Upper factor of the inverse: row k says how an error of column k spreads over the columns behind it.
        self.spread = torch.linalg.cholesky(factor, upper=True, out=factor)


def compensate(weight: torch.Tensor, hessian: Hessian, form: Format | None = None) -> Rounded:
    """Rounds weight [N, K] to a format, by default E4M3."""
    order, spread = hessian.order, hessian.spread
    cost = torch.empty_like(spread[0])
    cost[order] = spread.diagonal().square().reciprocal()
    grid = (form or E4m3()).search(weight, cost)
    numbers = torch.empty_like(weight)
    numbers[:, order] = _round_columns(weight[:, order], spread, grid, order.tolist())
    return grid.rounded(numbers)


def _round_columns(work: torch.Tensor, spread: torch.Tensor, grid: Grid, names: Sequence[int]) -> torch.Tensor:
    """The grid's numbers for work [N, K], which is overwritten; `names`: which column of the weight each one is."""
    columns = work.shape[1]
    numbers = torch.empty_like(work)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block, factor = work[:, start:stop].T.contiguous(), spread[start:stop, start:stop]
        errors = torch.empty_like(block)
        for k in range(stop - start):
            column = names[start + k]
            nearest = grid.nearest(block[k], column)
            numbers[:, start + k] = nearest
            errors[k] = (block[k] - grid.value(nearest, column)) / factor[k, k]
            block[k + 1 :].addr_(factor[k, k + 1 :], errors[k], alpha=-1)
        work[:, stop:] -= errors.T @ spread[start:stop, stop:]
    return numbers


def fit_rows(rounded: Rounded, wanted: torch.Tensor, outputs: torch.Tensor) -> Rounded:
    """Each row's scale once more, by least squares: what `outputs` [T, N], made with `rounded`, must be multiplied by
    to come nearest to `wanted` [T, N]. A row whose outputs say nothing stays as it is.
    """
    energy, product = torch.zeros((2, wanted.shape[1]))
    for ours, theirs in zip(outputs.split(_TOKENS), wanted.split(_TOKENS), strict=True):
        energy += ours.square().sum(0)
        product += (theirs * ours).sum(0)
    factor = product / torch.where(energy > 0, energy, torch.ones_like(energy))
    factor = torch.where((energy > 0) & (factor > 0), factor, torch.ones_like(factor))
    return rounded.times(factor[:, None])
