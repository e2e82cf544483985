"""How fast a plan is, beside a peer in the same run: prefill, decode at batch 1, load. Medians of interleaved repeats.

Comes in: a plan, optionally the checkpoint for the peer. Goes out: `Measurement`s. Must not know: printing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.artifacts.plan import Plan
from llmc.runtime.selftest import Probe

PREFILL_TOKENS = 512
DECODE_PROMPT = 16


@dataclass(frozen=True)
class Measurement:
    """Medians over the repeats, in tokens per second, and seconds to load until the first token is there."""

    system: str
    prefill: float
    decode: float
    load: float


class System:
    """What is timed: `prefill(ids)` computes a prompt's last logits, `decode(ids, n)` the seconds for n more tokens."""

    def __init__(self, name: str, load: float, prefill: Callable[[Sequence[int]], Any],
                 decode: Callable[[Sequence[int], int], float]) -> None:  # fmt: skip
        self.name, self.load, self.prefill, self.decode = name, load, prefill, decode


@contextmanager
def engine(path: Path, threads: int | None = None) -> Iterator[System]:
    """The plan, without scheduler or server."""
    began = time.perf_counter()
    with Probe(Plan.open(path), threads=threads) as probe:
        probe.prefill([1])
        load = time.perf_counter() - began

        def decode(ids: Sequence[int], count: int) -> float:
            probe.prefill(ids)
            start = time.perf_counter()
            for step in range(count):
                probe.step([ids[step % len(ids)]], len(ids) + step, 1)
            return time.perf_counter() - start

        build = probe.plan.manifest.build
        yield System(f"llmc {build.precision} tp {build.tp}", load, probe.prefill, decode)


@contextmanager
def transformers(model: Path, threads: int) -> Iterator[System]:
    """Hugging Face transformers, eager, float32, with its own KV cache."""
    import torch  # before the builder, which tells OpenMP to spare other processes: the peer runs as it comes

    from llmc.builder.checkpoint import open_checkpoint
    from llmc.builder.reference import load_reference

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    began = time.perf_counter()
    module = load_reference(open_checkpoint(model))

    def prefill(ids: Sequence[int]) -> Any:
        with torch.inference_mode():
            return module(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)

    def decode(ids: Sequence[int], count: int) -> float:
        cache = prefill(ids).cache
        start = time.perf_counter()
        with torch.inference_mode():
            for step in range(count):
                token = torch.tensor([[ids[step % len(ids)]]])
                cache = module(token, cache=cache, use_cache=True, logits_to_keep=1).cache
        return time.perf_counter() - start

    prefill([1])
    try:
        yield System("transformers fp32 eager", time.perf_counter() - began, prefill, decode)
    finally:
        torch.set_num_threads(before)


def measure(systems: Sequence[System], ids: Sequence[int], repeats: int, decode_tokens: int) -> list[Measurement]:
    """Times every system in turn, `repeats` times over, so that a noisy moment meets all of them."""
    prefill: dict[str, list[float]] = {system.name: [] for system in systems}
    decode: dict[str, list[float]] = {system.name: [] for system in systems}
    for _ in range(repeats):
        for system in systems:
            start = time.perf_counter()
            system.prefill(ids)
            prefill[system.name].append(len(ids) / (time.perf_counter() - start))
            decode[system.name].append(decode_tokens / system.decode(ids[:DECODE_PROMPT], decode_tokens))
    median = statistics.median
    return [Measurement(s.name, median(prefill[s.name]), median(decode[s.name]), s.load) for s in systems]
