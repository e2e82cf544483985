"""How far one model is from another: perplexity, divergence, agreement. Does not know where logits come from.

Comes in: two functions from token ids to logits, and windows of tokens. Goes out: `Quality`. Must not know: engines,
torch, checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Token ids [T] -> logits f32[T, V]: row t predicts token t + 1.
LogitsOf = Callable[[Sequence[int]], np.ndarray]

_STRIDE, _START = 4096, 1024


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


def compare(windows: Iterable[Sequence[int]], reference: LogitsOf, candidate: LogitsOf) -> Quality:
    """Runs both on every window, one at a time: memory is two windows' logits."""
    tokens = rows = agree = 0
    reference_loss = candidate_loss = divergence = 0.0
    cosines: list[np.ndarray] = []
    for window in windows:
        theirs, ours = reference(window), candidate(window)
        if theirs.shape != ours.shape or len(theirs) != len(window):
            raise ValueError(f"logits of shape {ours.shape} and {theirs.shape} for {len(window)} tokens")
        cosines.append(_cosine(theirs, ours))
        agree += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        theirs, ours = _log_softmax(theirs), _log_softmax(ours)
        divergence += float((np.exp(theirs) * (theirs - ours)).sum(dtype=np.float64))
        reference_loss += _loss(theirs, window)
        candidate_loss += _loss(ours, window)
        tokens += len(window) - 1
        rows += len(window)
    return Quality(
        tokens=tokens,
        reference_perplexity=math.exp(reference_loss / tokens),
        perplexity=math.exp(candidate_loss / tokens),
        kl=divergence / rows,
        top1=agree / rows,
        cosine_p5=float(np.percentile(np.concatenate(cosines), 5)),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float32) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def _loss(log_probabilities: np.ndarray, window: Sequence[int]) -> float:
    rows = np.arange(len(window) - 1)
    return -float(log_probabilities[rows, np.asarray(window[1:])].sum(dtype=np.float64))


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    def length(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.square(x, dtype=np.float64).sum(-1))

    return np.einsum("tv,tv->t", a, b, dtype=np.float64) / (length(a) * length(b))
