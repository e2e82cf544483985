"""Which tactics suit this machine: plans of one model that differ in nothing else, timed beside one another.

Comes in: a checkpoint, the shape of a build, a target. Goes out: `Trial`s, the best of them. Must not know: printing,
what tactics mean.

One tactic after the other takes the value with which the plan is fastest, the others staying as they are. Each value's
plan is timed in turn with the best so far, several times over, so that a noisy moment meets both, and the slower one is
deleted; a value is taken only if it wins by more than `MARGIN`, which is more than a busy machine's medians scatter. On
a GPU its own clock counts, the time between events around each launch, and one plan is timed behind the other, as both
may not fit.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmc import flow
from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.plan import Plan
from llmc.bench.engine import EngineSystem, engine
from llmc.bench.work import SHORT_CONTEXT, Work
from llmc.profiles import CpuTarget, CudaTarget, load_target
from llmc.profiles.tactics import CHOICES
from llmc.runtime.cuda.gpus import check as check_gpus
from llmc.runtime.cuda.gpus import survey
from llmc.runtime.selftest import Probe

#: Tokens of the steps that are timed: decode of one, a few and many sequences, and prefill.
STEPS = (1, 4, 16, 64, 512)
#: What a value must win, as a geometric mean over the steps.
MARGIN = 1.02
#: What each number of a blocking may be on a GPU: of products (plugins/cuda/tiles.py), and of attention
#: (plugins/cuda/partitions.py). The first one changes every
#: kernel that is cut so: where it changes nothing, a model has none, and the others are not tried.
FIRST = "warps"
CUDA_CHOICES: Mapping[str, tuple[int, ...]] = {
    FIRST: (4, 8),
    "rows": (16, 32, 64, 128),
    "columns": (16, 32, 64, 128),
    "depth_bytes": (64, 128, 256),
    "stages": (2, 3, 4, 5),
    "keys": (16, 32, 64, 128),
    "partition": (128, 256, 512, 1024),
}


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


@dataclass(frozen=True)
class _Kind:
    """A kind of target: its own `tactics` by key, what each may be, a file of some, and how two plans are timed."""

    tactics: Mapping[str, int]
    choices: Mapping[str, tuple[int, ...]]
    file: Callable[[Mapping[str, int]], str]
    ratios: Callable[[Path, Path, int], dict[int, float]]


def tune(
    model: Path, target: str, shape: Mapping[str, object], repeats: int, tell: Callable[[Trial, bool], None]
) -> str:
    """The best tactics found, as a file for `flow.build`; `shape`: options of it that decide about kernels (precision,
    tp, profile). `tell` hears of each trial, and whether it was taken. Raises LlmcError as `flow.build` does, and for a
    target whose GPU is not here.
    """
    kind = _kind(target, int(str(shape.get("tp", 1))))
    best, unused = dict(kind.tactics), set[str]()
    with tempfile.TemporaryDirectory(prefix="llmc-tune-") as made:
        folder = Path(made)

        def plan(tactics: Mapping[str, int]) -> Path:
            named = folder / f"{'-'.join(map(str, tactics.values()))}.yaml"
            named.write_text(kind.file(tactics))
            path = named.with_suffix(".plan")
            flow.build(model, path, target=target, tactics=named, self_test=False, **shape)  # type: ignore[arg-type]
            return path

        ours = plan(best)
        for key, values in kind.choices.items():
            blocking, _, number = key.rpartition(".")
            for value in [value for value in values if value != best[key]]:
                candidate = {**best, key: value}
                theirs = None if blocking in unused else _if_it_fits(plan, candidate)
                if theirs is None:
                    continue
                taken = False
                if _code(ours) != _code(theirs):
                    trial = Trial(key, value, kind.ratios(ours, theirs, repeats))
                    taken = trial.gain > MARGIN
                    tell(trial, taken)
                elif number == FIRST:
                    unused.add(blocking)
                if taken:
                    best, ours, theirs = candidate, theirs, ours
                theirs.unlink()  # a plan holds all weights: there are never more than two
    return kind.file(best)


def _kind(target: str, tp: int) -> _Kind:
    """Raises LlmcError for a target that this machine cannot time: first, before anything is built."""
    described = load_target(target)
    if isinstance(described, CpuTarget):
        return _Kind(vars(described.tactics), CHOICES, lambda tactics: _yaml(dict(tactics)), _ratios)
    if not isinstance(described, CudaTarget):
        raise UnsupportedError(
            f"--target {target}: TensorRT measures its kernels itself; cpu and cuda targets are tuned"
        )
    check_gpus(described.fingerprint, tp, survey())
    own = _flat(described)
    choices = {key: CUDA_CHOICES[key.rpartition(".")[2]] for key in _ordered(own)}
    return _Kind(own, choices, lambda tactics: _yaml(_nested(tactics, own)), _gpu_ratios)


def _flat(target: CudaTarget) -> dict[str, int]:
    """The blockings of products and attention, as `operator.blocking.number`."""
    return {
        f"{op}.{blocking}.{number}": value
        for op, blockings in target.tactics.items()
        for blocking, numbers in blockings.items()
        for number, value in numbers.items()
        if number in CUDA_CHOICES
    }


def _ordered(keys: Mapping[str, int]) -> list[str]:
    """Each blocking's numbers in the order of CUDA_CHOICES, whatever a target's description has."""
    order = list(CUDA_CHOICES)
    blockings = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    return [key for blocking in blockings for number in order if (key := f"{blocking}.{number}") in keys]


def _nested(tactics: Mapping[str, int], own: Mapping[str, int]) -> dict[str, Any]:
    """The numbers that are not the target's own, as `load_target` takes them."""
    found: dict[str, Any] = {}
    for key, value in tactics.items():
        if value != own[key]:
            op, blocking, number = key.split(".")
            found.setdefault(op, {}).setdefault(blocking, {})[number] = value
    return found


def _yaml(tactics: dict[str, Any]) -> str:
    return yaml.safe_dump(tactics, sort_keys=False)


def _if_it_fits(plan: Callable[[Mapping[str, int]], Path], tactics: Mapping[str, int]) -> Path | None:
    """None where a tile is too large for the GPU."""
    try:
        return plan(tactics)
    except UnsupportedError:
        return None


def _code(path: Path) -> dict[str, str]:
    """Hashes of what ranks run."""
    sections = Plan.open(path).manifest.sections
    return {section.name: section.blake3 for section in sections if section.name.startswith("code/")}


def _gpu_ratios(ours: Path, theirs: Path, repeats: int) -> dict[int, float]:
    """As `_ratios`, by the GPU's clock."""
    times = [_gpu_seconds(path, repeats) for path in (ours, theirs)]
    return {tokens: times[0][tokens] / times[1][tokens] for tokens in times[0]}


def _gpu_seconds(path: Path, repeats: int) -> dict[int, float]:
    """Tokens of a step -> the median of its launches' seconds on the slowest rank: decodes, then a prefill."""
    profile = Plan.open(path).manifest.profile
    context = min(SHORT_CONTEXT, profile.max_seq_len)
    *decodes, prompt = STEPS
    batches = dict.fromkeys(min(batch, profile.max_num_seqs) for batch in decodes)
    longest = min(prompt, profile.max_num_batched_tokens, profile.max_seq_len)
    chosen = [*(Work("decode", batch, context) for batch in batches), Work("prefill", 1, longest)]
    with engine(path, chosen, 1, timed=True) as system:
        return {work.tokens: statistics.median(_once(system, work) for _ in range(repeats)) for work in chosen}


def _once(system: EngineSystem, work: Work) -> float:
    system.run(work, 1)
    return max(sum(seconds) for seconds in system.launch_seconds())


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
