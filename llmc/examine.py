"""Asks a finished engine and its checkpoint the same questions: golden answers, and the figures that the gate judges.

Comes in: a `Source`, a sealed plan, `Exam`. Goes out: a `Verdict` with the sections golden.json and quality.json.
Must not know: how plans are compiled, published or reported.

The figures come from PyTorch on one side, whose last digits differ between machines and thread counts; they are rounded
so far that a plan's bytes do not (barring a figure that lies on the edge between two roundings).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.errors import CheckpointError, EnvironmentFault, UsageError
from llmc.artifacts.plan import Plan, machine_features
from llmc.artifacts.schema import Manifest, Target
from llmc.builder.progress import Progress
from llmc.builder.reference import batch_logits, forced, greedy
from llmc.builder.verdict import Verdict
from llmc.gate import OFF, Exam
from llmc.runtime.cuda.gpus import check as check_gpus
from llmc.runtime.cuda.gpus import check_tensorrt, choose_gpu_blocks, survey
from llmc.runtime.machine import has_gpu_driver
from llmc.runtime.selftest import Probe, probe_blocks
from llmc.source import Source

if TYPE_CHECKING:
    from llmc.calibration.quality import Quality

#: What a plan is asked when it is built, and again by `llmc verify --run`. The last one spans blocks and token ranges.
GOLDEN_PROMPTS = (
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time",
    "A list of numbers: " + ", ".join(str(n) for n in range(1, 40)),
)
#: Tokens of each answer; fewer where max_seq_len has no room for them.
GOLDEN_TOKENS = 12
#: For greedy agreement: the first tokens of a window are the prompt, and so many are written behind it.
_PROMPT, _CONTINUATION = 32, 16
#: What quality.json says of a comparison that took place.
DONE = "done"
DEFAULT_TEXT = "pydoc_data.topics"
#: Figure -> digits: significant ones of a perplexity and of a divergence, decimals of a share.
_DIGITS: dict[str, Callable[[float], float]] = {
    "reference_perplexity": lambda x: float(f"{x:.4g}"),
    "perplexity": lambda x: float(f"{x:.4g}"),
    "perplexity_change": lambda x: round(x, 4),
    "kl": lambda x: round(x, 4),
    "top1": lambda x: round(x, 3),
    "cosine_p5": lambda x: round(x, 5),
    "greedy": lambda x: round(x, 3),
}


def cannot_run(target: Target, tp: int, plan: Manifest | None = None) -> str | None:
    """Why this machine cannot run an engine for this target, in words; None where it can. `plan`: the finished one's
    manifest, which says what a GPU must have free, too.
    """
    if target.on_gpu and not has_gpu_driver():
        return "no GPU"
    missing = sorted(set(target.features) - machine_features())
    if missing:
        return f"this machine lacks {', '.join(missing)}"
    if not target.on_gpu:
        return None
    try:
        machine = survey()
        check_gpus(target, tp, machine)
        if target.kind == "tensorrt":
            check_tensorrt(plan.build.libraries.get("tensorrt") if plan is not None else None)
    except EnvironmentFault as fault:
        return str(fault)
    try:
        if plan is not None:
            choose_gpu_blocks(plan, machine.gpus, num_blocks=probe_blocks(plan.profile))
    except EnvironmentFault:
        # The reason stands in the plan, whose bytes must not depend on how much is free at the moment.
        return f"too little free memory on this machine's {'GPU' if tp == 1 else 'GPUs'}"
    return None


def require_judge(exam: Exam, target: Target, reason: str | None) -> None:
    """Raises EnvironmentFault where a gate is set and this machine cannot run the engine that it is to judge, for
    `reason`: found out before the build where it can be, not after.
    """
    if exam.evaluate and exam.gate is not None and reason is not None:
        raise EnvironmentFault(
            f"{reason}: so an engine for {target.kind}:{target.isa} cannot be compared with its checkpoint here, and a "
            "build is published only when the gate has judged it; build on a machine that can run it, choose another "
            f"--target, or publish it unjudged with --gate {OFF}"
        )


@dataclass(frozen=True)
class EvaluationText:
    """`name` for the plan, never a path; `windows` of token ids."""

    name: str
    windows: list[list[int]]


def examine(source: Source, path: Path, exam: Exam, text: EvaluationText | None, progress: Progress) -> Verdict:
    """Runs the engine at `path`, if this machine can, beside the checkpoint's Hugging Face model at float32. Without
    `text` their answers to the golden prompts alone are recorded. The gate judges the figures before they are rounded.
    """
    plan = Plan.open(path, verify=False)
    figures: dict[str, float] = {}
    target = plan.manifest.target
    reason = cannot_run(target, len(plan.manifest.ranks), plan.manifest)
    require_judge(exam, target, reason)
    if reason is not None:
        with progress.stage("golden"):
            golden = _golden_without_engine(source, plan)
        quality: dict[str, Any] = {"run": f"not run: {reason}"}
    else:
        with Probe(plan) as probe:
            with progress.stage("golden"):
                golden = _golden(source, probe)
            quality = {"run": "not asked for"}
            if text is not None:
                with progress.stage("evaluate"):
                    quality, figures = _quality(source, probe, text, golden["prompts"])
    gate = exam.gate if figures else None
    broken = gate.broken(figures) if gate is not None else ()
    quality["gate"] = OFF if gate is None else str(gate)
    quality["verdict"] = "not judged" if gate is None else "; ".join(broken) or "passed"
    return Verdict({"golden.json": _json(golden), "quality.json": _json(quality)}, quality, broken)


def _golden(source: Source, probe: Probe) -> dict[str, Any]:
    """The engine's answers, and beside each token the one that the checkpoint has for that place."""
    prompts, count = _prompts(source, probe.plan)
    answers = probe.greedy(prompts, count)
    rows = zip(prompts, forced(source.reference, prompts, answers), answers, strict=True)
    return {
        "tokens": count,
        "prompts": [{"ids": ids, "hf_tokens": hf, "engine_tokens": engine} for ids, hf, engine in rows],
    }


def _golden_without_engine(source: Source, plan: Plan) -> dict[str, Any]:
    """The checkpoint's own answers."""
    prompts, count = _prompts(source, plan)
    answers = [greedy(source.reference, ids, count) for ids in prompts]
    rows = zip(prompts, answers, strict=True)
    return {"tokens": count, "prompts": [{"ids": ids, "hf_tokens": hf, "engine_tokens": None} for ids, hf in rows]}


def _prompts(source: Source, plan: Plan) -> tuple[list[list[int]], int]:
    """Token ids of the golden prompts, and how many tokens an answer has."""
    longest = plan.manifest.profile.max_seq_len
    count = min(GOLDEN_TOKENS, longest // 2)
    prompts = [ids[: longest - count] for text in GOLDEN_PROMPTS if (ids := source.encode(text))]
    if not prompts:
        raise CheckpointError(f"{source.checkpoint.path}: the tokenizer turns plain English into nothing")
    return prompts, count


def _quality(
    source: Source, probe: Probe, text: EvaluationText, golden: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, float]]:
    """What quality.json says of the comparison, and its figures as they were measured."""
    from llmc.calibration.quality import compare

    windows = text.windows
    reference = batch_logits(source.reference, windows)
    quality = compare(windows, lambda ids: next(reference), probe.pieces)
    agree = [h == e for p in golden for h, e in zip(p["hf_tokens"], p["engine_tokens"], strict=True)]
    agree += _continuations(source, probe, windows)
    figures = {**_figures(quality), "greedy": sum(agree) / len(agree)}
    record = {
        "run": DONE,
        "text": text.name,
        "windows": len(windows),
        "window": max(map(len, windows)),
        "tokens": quality.tokens,
        **{name: _number(_DIGITS[name](value)) for name, value in figures.items()},
        "greedy_tokens": len(agree),
    }
    return record, figures


def _continuations(source: Source, probe: Probe, windows: Sequence[Sequence[int]]) -> list[bool]:
    """The engine goes on behind the head of each window; whether each of its tokens is what the checkpoint would have
    written there, given all before it.
    """
    heads = [list(window[: max(1, min(_PROMPT, len(window) // 2))]) for window in windows]
    room = probe.plan.manifest.profile.max_seq_len
    answers = probe.greedy(heads, min(_CONTINUATION, room - max(map(len, heads))))
    expected = forced(source.reference, heads, answers)
    return [h == e for hf, engine in zip(expected, answers, strict=True) for h, e in zip(hf, engine, strict=True)]


def _figures(quality: Quality) -> dict[str, float]:
    return {name: getattr(quality, name) for name in _DIGITS if name != "greedy"}


def _number(value: float) -> float | str:
    """JSON has neither NaN nor infinity: a broken engine's figures are words."""
    return value if math.isfinite(value) else str(value)


def evaluation_text(source: Source, exam: Exam, longest: int) -> EvaluationText:
    """What both sides will read; asked for before the build, whose minutes a text that cannot be used would cost.
    Raises UsageError naming the option.
    """
    from llmc.calibration.data import read_samples
    from llmc.calibration.quality import evaluation_windows

    length = min(exam.length, longest)
    if exam.text is None:
        try:
            windows = evaluation_windows(source.encode, windows=exam.windows, length=length)
        except ValueError as error:
            raise UsageError(f"--eval-windows {exam.windows} --eval-length {exam.length}: {error}") from error
        return EvaluationText(DEFAULT_TEXT, windows)
    samples = read_samples(source.checkpoint, exam.text, exam.windows, length, seed=0)
    windows = [list(ids) for ids in samples.ids]
    if max(map(len, windows)) < 2:
        raise UsageError(
            f"--eval {exam.text}: no window has two tokens: there is nothing to predict; a longer text has"
        )
    return EvaluationText(f"{samples.source}, sha256 {samples.sha256}", windows)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
