"""What is asked: prompts of wanted lengths, with shared prefixes, and when each is sent.

Comes in: `Workload`. Goes out: `Ask`s, the same for the same seed. Must not know: HTTP, the server.

A prompt is made of common short words, of which nearly every vocabulary holds each as one token; how many tokens it
really was is what the server says. Gaps between requests are gamma-distributed: burstiness 1 is a Poisson process,
below 1 comes in bursts, above 1 is more even (as in `vllm bench serve`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point home "
    "water room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city name president team minute "
    "idea body information back parent "
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Workload:
    """Lengths are in words. Each is drawn evenly from its mean times 1 - `range_ratio` to 1 + `range_ratio`.

    Every prompt begins with one of `num_prefixes` texts of `prefix_len` words, in turn, before its own `input_len`.
    `request_rate` is in requests a second, infinite for all at once.
    """

    num_prompts: int = 100
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    request_rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Ask:
    """One request: sent `at` seconds after the start."""

    at: float
    prompt: str
    max_tokens: int


def asks(workload: Workload) -> list[Ask]:
    """The requests, in the order in which they are sent."""
    rng = np.random.default_rng(workload.seed)
    prefixes = [_text(rng, workload.prefix_len) for _ in range(workload.num_prefixes)]
    found = []
    for i, at in enumerate(_times(rng, workload)):
        own = _text(rng, _length(rng, workload.input_len, workload.range_ratio))
        prompt = f"{prefixes[i % len(prefixes)]} {own}".strip()
        found.append(Ask(float(at), prompt, _length(rng, workload.output_len, workload.range_ratio)))
    return found


def _times(rng: np.random.Generator, workload: Workload) -> np.ndarray:
    """f64[num_prompts], the first at 0."""
    if np.isinf(workload.request_rate):
        return np.zeros(workload.num_prompts)
    scale = 1 / (workload.request_rate * workload.burstiness)
    gaps = rng.gamma(workload.burstiness, scale, workload.num_prompts - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])


def _length(rng: np.random.Generator, mean: int, ratio: float) -> int:
    low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
    return max(int(rng.integers(low, high, endpoint=True)), 1)


def _text(rng: np.random.Generator, words: int) -> str:
    return " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), words))
