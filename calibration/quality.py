"""How far one model is from another: perplexity, divergence, agreement. Does not know where logits come from.

Comes in: two functions from token ids to logits, and windows of tokens. Goes out: `Quality`. Must not know: engines,
torch, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Token ids [T] -> logits f32[T, V]: row t predicts token t + 1.
LogitsOf = Callable[[Sequence[int]], np.ndarray]
#: The same in pieces of some rows each, in order; a piece is valid until the next one is asked for.
PiecesOf = Callable[[Sequence[int]], Iterable[np.ndarray]]

_STRIDE, _START = 4096, 1024
#: Logits that are compared at once: 256 KiB of each side.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Quality:
    """Of a candidate against a reference, over `tokens` predicted tokens.

    `kl` is the mean divergence from the reference in nats, `top1` the share of positions with the same best token,
    `cosine_p5` the 5th percentile of the logits' cosine.
    """

    tokens: int
    reference_perplexity: float
    perplexity: float
    kl: float
    top1: float
    cosine_p5: float

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.03 is 3 % worse than the reference."""
        return self.perplexity / self.reference_perplexity - 1


def evaluation_windows(encode: Callable[[str], Sequence[int]], windows: int = 12, length: int = 512) -> list[list[int]]:
    """Windows of Python's own documentation (`pydoc_data.topics`): text that every Python has and no table is made of.

    `encode` gives a text's ids without special tokens. The windows are spread evenly; a vocabulary with long tokens
    makes fewer of the text, and then the windows lie closer together. Raises ValueError if they would overlap.
    """
    from pydoc_data.topics import topics

    ids = list(encode("\n".join(topics[key] for key in sorted(topics))))
    stride = min(_STRIDE, (len(ids) - length) // max(1, windows - 1) if windows > 1 else _STRIDE)
    start = _START if _START + (windows - 1) * stride + length <= len(ids) else 0
    if stride < length and windows > 1:
        raise ValueError(f"{windows} windows of {length} tokens do not fit the text's {len(ids)} tokens")
    return [ids[start + i * stride : start + i * stride + length] for i in range(windows)]


def compare(windows: Iterable[Sequence[int]], reference: LogitsOf, candidate: PiecesOf) -> Quality:
    """Runs both on every window, one at a time: memory is one window's logits and a piece. Windows may differ in
    length. Raises ValueError for logits of another shape, and where no window has two tokens.
    """
    totals = _Totals()
    for window in windows:
        _add(totals, window, reference(window), candidate(window))
    return totals.quality()


def _add(totals: _Totals, window: Sequence[int], theirs: np.ndarray, pieces: Iterable[np.ndarray]) -> None:
    """One window, whose logits nobody holds any more afterwards."""
    following, at = np.asarray([*window[1:], -1]), 0  # nothing follows the last one
    size = max(1, _BLOCK // theirs.shape[1])
    for piece in pieces:
        rows = theirs[at : at + len(piece)]
        if rows.shape != piece.shape:
            raise ValueError(f"logits of shape {piece.shape} from token {at} on beside {theirs.shape}")
        for start in range(0, len(piece), size):
            stop = start + size
            totals.add(rows[start:stop], piece[start:stop], following[at + start : at + start + len(piece[start:stop])])
        at += len(piece)
    if not at == len(theirs) == len(window):
        raise ValueError(f"logits of {at} and {len(theirs)} tokens for {len(window)}")


class _Totals:
    """Sums over rows. A block of rows stays in the processor's cache from one operation to the next."""

    def __init__(self) -> None:
        self.tokens = self.rows = self.agree = 0
        self.reference_loss = self.candidate_loss = self.divergence = 0.0
        self.cosines: list[np.ndarray] = []

    def add(self, theirs: np.ndarray, ours: np.ndarray, following: np.ndarray) -> None:
        """f32[R, V] of both, and the token that follows each row, -1 for none."""
        self.rows += len(theirs)
        self.agree += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        self.cosines.append(_dot(theirs, ours) / np.sqrt(_dot(theirs, theirs) * _dot(ours, ours)))
        theirs, weights, mass = _softmax(theirs)
        ours, _, mine = _softmax(ours)
        self.divergence += float((_dot(weights, theirs - ours) / mass + np.log(mine) - np.log(mass)).sum())
        rows = np.flatnonzero(following >= 0)
        self.tokens += len(rows)
        self.reference_loss += float((np.log(mass[rows]) - theirs[rows, following[rows]]).sum())
        self.candidate_loss += float((np.log(mine[rows]) - ours[rows, following[rows]]).sum())

    def quality(self) -> Quality:
        """The means. A loss that no float can hold the exponential of is an infinite perplexity."""
        if not self.tokens:
            raise ValueError("no window has two tokens: there is nothing to predict")
        with np.errstate(over="ignore"):
            reference, candidate = np.exp(np.asarray([self.reference_loss, self.candidate_loss]) / self.tokens)
        return Quality(
            tokens=self.tokens,
            reference_perplexity=float(reference),
            perplexity=float(candidate),
            kl=self.divergence / self.rows,
            top1=self.agree / self.rows,
            cosine_p5=float(np.percentile(np.concatenate(self.cosines), 5)),
        )


def _softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits less each row's largest, their exponentials, and the exponentials' sum f64[R]."""
    shifted = logits - logits.max(-1, keepdims=True)
    weights = np.exp(shifted)
    return shifted, weights, weights.sum(-1).astype(np.float64)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row: f64[R], of float32 sums."""
    return np.vecdot(a, b).astype(np.float64)
