"""The truth for `cpu.h`: one row of logits and its parameters to a token, step for step as that file describes.

Comes in: numpy. Goes out: `sample`, `philox`, `exp`. Must not know: builder, runtime. Tokens agree exactly: weights are
whole numbers, and `exp` repeats the native polynomial (fused multiply-adds are float64 ones rounded once to float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

GREEDY_BELOW = np.float32(1e-5)
_ONE = 2.0**30
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


#: Anything with the fields of `llmc_sampling`, as `runtime.native_sampler.SamplingRow`, which this room may not import.
Row = Any


@dataclass(frozen=True)
class Choice:
    """As `llmc_sampled`, with the best alternatives. `token` -1: NaN, +inf or nothing to choose from."""

    token: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


def philox(key: int, counter: int) -> int:
    """Philox 4x32-10 (Salmon et al., 2011) on the counter words (counter, counter >> 32, 0, 0); its first 64 bits."""
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32 & mask, 0, 0]
    k = [key & mask, key >> 32 & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[1] << 32 | c[0]


def exp(x: np.ndarray) -> np.ndarray:
    """e^x, f32 to f32, with the bits of `exp` in plugins/cpu/lanes.h."""

    def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)

    lowest = np.float32(-87.33654)
    y = np.minimum(np.float32(88.0), np.maximum(lowest, x.astype(np.float32)))
    n = np.rint(y * np.float32(1.44269504088896341))
    r = fused(n, np.full_like(n, -0.693359375), y)
    r = fused(n, np.full_like(n, 2.12194440e-4), r)
    p = np.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = fused(p, r, np.full_like(r, coefficient))
    p = fused(p, r * r, r) + np.float32(1.0)
    return np.where(x < lowest, np.float32(0.0), np.ldexp(p, n.astype(np.int32)).astype(np.float32))


def change_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Penalties, bias and bans on a copy: repetition over prompt and output, the others over the output alone."""
    x = logits.astype(np.float32).copy()
    size = len(x)
    output = np.array([i for i in row.output if 0 <= i < size], np.int64)
    seen = np.unique(np.concatenate([output, np.array([i for i in row.prompt if 0 <= i < size], np.int64)]))
    repetition = np.float32(row.repetition_penalty)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    ids, counts = np.unique(output, return_counts=True)
    x[ids] -= np.float32(row.frequency_penalty) * counts.astype(np.float32)
    x[ids] -= np.float32(row.presence_penalty)
    for token, bias in zip(row.bias_ids, row.bias, strict=True):
        if 0 <= token < size:
            x[token] += np.float32(bias)
    x[[i for i in row.banned if 0 <= i < size]] = -np.inf
    return x


def kept(weights: np.ndarray, row: Row) -> np.ndarray:
    """Which ids are left by top-k, then top-p, then min-p: bool[V]. `weights`: whole numbers, int64[V]."""
    order = np.lexsort((np.arange(len(weights)), -weights))
    running = np.cumsum(weights[order])
    size = row.top_k if 0 < row.top_k < len(weights) else len(weights)
    top_p = np.float64(np.float32(row.top_p))
    if top_p < 1:
        wanted = int(max(0.0, np.ceil(top_p * np.float64(running[size - 1]))))
        size = min(size, int(np.searchsorted(running, wanted, side="left")) + 1)
    mask = np.zeros(len(weights), bool)
    mask[order[:size]] = True
    if row.min_p > 0:
        mask &= weights >= min(np.float64(np.float32(row.min_p)), 1.0) * _ONE
    return mask


def draw(x: np.ndarray, row: Row) -> int:
    """One token of the changed logits at a temperature above zero."""
    inverse = np.float32(1.0) / np.float32(row.temperature)
    weights = np.rint(exp((x - x.max()) * inverse) * np.float32(_ONE)).astype(np.int64)
    weights = np.where(kept(weights, row), weights, 0)
    running = np.cumsum(weights)
    target = philox(row.seed, row.counter) * int(running[-1]) >> 64
    return int(np.searchsorted(running, target, side="right"))


def sample(logits: np.ndarray, row: Row) -> Choice:
    """logits f32[V], unchanged."""

    def unusable(x: np.ndarray) -> bool:
        return bool(np.isnan(x).any() or np.isposinf(x).any() or np.isneginf(x).all())

    if unusable(logits):
        return Choice(-1)
    x = change_logits(logits, row)
    if unusable(x):
        return Choice(-1)
    token = int(np.argmax(x)) if np.float32(row.temperature) < GREEDY_BELOW else draw(x, row)
    if row.num_logprobs < 0:
        return Choice(token)
    raw = logits.astype(np.float64)
    logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    order = np.lexsort((np.arange(len(raw)), -raw))
    rank = int(np.flatnonzero(order == token)[0]) + 1
    top = tuple((int(i), float(logprobs[i])) for i in order[: row.num_logprobs])
    return Choice(token, float(logprobs[token]), rank, top)
