"""Which tactics suit this machine: plans of one model that differ in nothing else, timed beside one another.

Comes in: a checkpoint, the shape of a build, a target. Goes out: `Trial`s, the best of them. Must not know: printing,
what tactics mean.

One tactic after the other takes the value with which the plan is fastest, the others staying as they are. Each value's
plan is timed in turn with the best so far, several times over, so that a noisy moment meets both; a value is taken only
if it wins by more than `MARGIN`, which is more than a busy machine's medians scatter.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from llmc import flow
from llmc.artifacts.plan import Plan
from llmc.profiles import Tactics, load_cpu_target
from llmc.profiles.tactics import CHOICES
from llmc.runtime.selftest import Probe

#: Tokens of the steps that are timed: decode of one, a few and many sequences, and prefill.
STEPS = (1, 4, 16, 64, 512)
#: What a value must win, as a geometric mean over the steps.
MARGIN = 1.02


@dataclass(frozen=True)
class Trial:
    """`key` set to `value`: by how much each step was faster than with the best until then."""

    key: str
    value: int
    ratios: Mapping[int, float]

    @property
    def gain(self) -> float:
        """The geometric mean of the ratios."""
        return math.prod(self.ratios.values()) ** (1 / len(self.ratios))


def tune(
    model: Path, target: str, shape: Mapping[str, object], repeats: int, tell: Callable[[Trial, bool], None]
) -> Tactics:
    """The best tactics found; `shape`: options of `flow.build` that decide about kernels (precision, tp, profile).
    `tell` hears of each trial, and whether it was taken. Raises LlmcError as `flow.build` does.
    """
    best = load_cpu_target(target).tactics
    with tempfile.TemporaryDirectory(prefix="llmc-tune-") as made:
        folder = Path(made)

        def plan(tactics: Tactics) -> Path:
            named = folder / f"{'-'.join(map(str, vars(tactics).values()))}.yaml"
            named.write_text(tactics.to_yaml())
            path = named.with_suffix(".plan")
            if not path.exists():
                flow.build(model, path, target=target, tactics=named, evaluate=False, **shape)  # type: ignore[arg-type]
            return path

        for key, values in CHOICES.items():
            tried = [value for value in values if value != getattr(best, key)]
            for value in tried:
                candidate = replace(best, **{key: value})
                trial = Trial(key, value, _ratios(plan(best), plan(candidate), repeats))
                taken = trial.gain > MARGIN
                tell(trial, taken)
                best = candidate if taken else best
    return best


def _ratios(ours: Path, theirs: Path, repeats: int) -> dict[int, float]:
    """By how much each step is faster with the second plan."""
    times: list[dict[int, list[float]]] = [{}, {}]
    with ExitStack() as stack:
        probes = [stack.enter_context(Probe(Plan.open(path))) for path in (ours, theirs)]
        for _ in range(repeats):
            for probe, found in zip(probes, times, strict=True):
                for tokens, seconds in _steps(probe):
                    found.setdefault(tokens, []).append(seconds)
    return {tokens: statistics.median(times[0][tokens]) / statistics.median(times[1][tokens]) for tokens in times[0]}


def _steps(probe: Probe) -> Iterator[tuple[int, float]]:
    """Tokens of a step, and seconds that it takes, with all logits that a step of so many sequences has."""
    profile, vocabulary = probe.plan.manifest.profile, probe.plan.manifest.model.vocab_size
    most = min(profile.max_num_batched_tokens, profile.max_seq_len)
    for tokens in dict.fromkeys(min(step, most) for step in STEPS):
        ids = [3 + i * 7919 % max(vocabulary - 3, 1) for i in range(tokens)]
        rows = tokens if tokens <= probe.max_chunk else 1
        count = max(64 // tokens, 1)
        start = time.perf_counter()
        for _ in range(count):
            probe.step(ids, 0, rows)
        yield tokens, (time.perf_counter() - start) / count
