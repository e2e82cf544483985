"""The build from end to end: the one place that composes builder, calibration and runtime.

Comes in: a checkpoint's path and options. Goes out: `engine.plan`, a `BuildReport`. Must not know: the command line.

    checkpoint -> (calibrate) -> compile -> ask the finished engine -> add golden answers and quality -> publish
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmc.artifacts.calibration import CalibrationTable, read_table
from llmc.artifacts.errors import CheckpointError, LlmcError, UsageError
from llmc.artifacts.files import require_writable
from llmc.artifacts.lock import pin_plan, require_lockable
from llmc.artifacts.plan import Plan, machine_features
from llmc.builder.build import BuildOptions, BuildReport, MemoryPlan, Progress, compile_plan, dry_run, run_stages
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.dump import DumpFolder
from llmc.builder.pipeline import CompileOptions, pass_name, passes_until

#: What a plan is asked when it is built, and again by `llmc verify --run`. The last one spans blocks and token ranges.
GOLDEN_PROMPTS = (
    "The capital of France is",
    "def add(a, b):",
    "Once upon a time",
    "A list of numbers: " + ", ".join(str(n) for n in range(1, 40)),
)
#: Tokens of each answer; fewer where max_seq_len has no room for them.
GOLDEN_TOKENS = 12
#: Text on which engine and checkpoint are compared: windows of Python's own documentation.
EVALUATION_WINDOWS, EVALUATION_LENGTH = 12, 512


@dataclass(frozen=True)
class Source:
    """The checkpoint with its Hugging Face twin, loaded once and only if something asks for it."""

    checkpoint: Checkpoint

    @cached_property
    def reference(self) -> Any:
        """The torch module at float32."""
        from llmc.builder.reference import load_reference

        return load_reference(self.checkpoint)

    def encode(self, text: str) -> list[int]:
        """Token ids of text, with the BOS that the tokenizer itself adds."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.checkpoint.tokenizer_json.decode())
        tokenizer.no_truncation()  # a file can switch either on, for whoever used it last
        tokenizer.no_padding()
        return list(tokenizer.encode(text).ids)


def build(
    model: str | Path,
    output: str | Path = "engine.plan",
    *,
    precision: str = "bf16",
    tp: int = 1,
    profile: str = "chat",
    target: str = "cpu",
    calib: str | Path | None = None,
    lock: str | Path | None = None,
    evaluate: bool = True,
    verify_passes: bool = False,
    dump: str | Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Compiles `model` into the plan `output`; returns what it took and what came of it.

    `calib` is a calibration table (.json, from `llmc calibrate`) or data to calibrate with (.txt, .jsonl, a folder),
    for FP8 only. With `evaluate`, the finished engine and Hugging Face at fp32 read the same text, and the perplexity
    of both is reported. `dump` is a folder for the graph after each pass. Raises LlmcError; no plan is left then.
    """
    progress = progress or Progress()
    options = BuildOptions(precision=precision, tp=tp, profile=profile, target=target, verify_passes=verify_passes)
    source = Source(open_checkpoint(model))
    require_writable(Path(output))
    if lock is not None:
        require_lockable(Path(lock))
    watch = DumpFolder(Path(dump)) if dump is not None else lambda stage: None
    with progress.stage("hash"):
        source.checkpoint.pin()
    _check_texts(source.checkpoint)
    table = _calibration(source, precision, calib, progress)

    def self_test(plan: Path) -> dict[str, bytes]:
        return _ask(source, plan, evaluate, progress)

    report = compile_plan(source.checkpoint, options, table, Path(output), progress, self_test, watch)
    if lock is not None:
        pin_plan(Path(lock), Plan.open(output, verify=False))
    return report


def dump_passes(
    model: str | Path,
    dump: str | Path,
    stop_after: str,
    *,
    precision: str = "bf16",
    tp: int = 1,
    calib: str | Path | None = None,
    verify_passes: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the graph after each pass up to `stop_after` into the folder `dump`, and no plan. Raises LlmcError.

    `calib` as for `build`; calibrates only where one of these passes needs it.
    """
    progress = progress or Progress()
    options = BuildOptions(precision=precision, tp=tp, verify_passes=verify_passes)
    steps = passes_until(CompileOptions(precision=precision, tp=tp), stop_after)
    source, watch = Source(open_checkpoint(model)), DumpFolder(Path(dump))
    quantizes = "quantize" in map(pass_name, steps)
    if calib is not None and not quantizes:
        raise UsageError(f"--calib {calib}: quantize, which needs it, does not run before --stop-after {stop_after}")
    table = _calibration(source, precision, calib, progress) if quantizes else None
    run_stages(source.checkpoint, options, table, progress, watch, stop_after)


def plan_memory(model: str | Path, *, precision: str, tp: int, profile: str, target: str) -> MemoryPlan:
    """The memory arithmetic of such a build, before any weight is read."""
    options = BuildOptions(precision=precision, tp=tp, profile=profile, target=target)
    return dry_run(open_checkpoint(model), options)


def _check_texts(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a chat template or sampling defaults that the runtime would stumble over."""
    from llmc.runtime.chat_template import ChatTemplate
    from llmc.runtime.messages import SamplingParams
    from llmc.runtime.params import Limits, check, generation_defaults

    info = checkpoint.model_info()
    longest = info.max_position_embeddings
    try:
        if checkpoint.chat_template is not None:
            ChatTemplate(checkpoint.chat_template, checkpoint.tokenizer_config)
    except LlmcError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}; correct it, or remove it to build without chat") from error
    try:
        defaults = generation_defaults(checkpoint.generation_config)
        check(SamplingParams(**defaults), Limits(info.vocab_size, longest, longest))  # type: ignore[arg-type]
    except LlmcError as error:
        raise CheckpointError(f"{checkpoint.path}: generation_config.json: {error}") from error


def _calibration(
    source: Source, precision: str, calib: str | Path | None, progress: Progress
) -> CalibrationTable | None:
    if precision != "fp8":
        if calib is not None:
            raise UsageError(f"--calib {calib}: only an FP8 build is calibrated; add --fp8 or drop --calib")
        return None
    if calib is not None and Path(calib).suffix == ".json":
        table = read_table(Path(calib))
        table.check(source.checkpoint.digest)
        return table
    from llmc.calibration import calibrate

    with progress.stage("calibrate"):

        def advance(_: str, done: int, total: int) -> None:
            progress.advanced("calibrate", done, total)

        return calibrate(source.checkpoint, Path(calib) if calib is not None else None, progress=advance)


def _ask(source: Source, path: Path, evaluate: bool, progress: Progress) -> dict[str, bytes]:
    """Golden answers and quality of the engine at `path`, as sections; runs its code if this machine can."""
    plan = Plan.open(path, verify=False)
    runs_here = set(plan.manifest.target.features) <= machine_features()
    with progress.stage("golden"):
        golden = _golden(source, plan, runs_here)
    quality: dict[str, Any] = {"run": "not asked for" if runs_here else "not run: this machine lacks the target's ISA"}
    if runs_here and evaluate:
        with progress.stage("evaluate"):
            quality = _quality(source, plan)
    return {"golden.json": _json(golden), "quality.json": _json(quality)}


def _golden(source: Source, plan: Plan, runs_here: bool) -> dict[str, Any]:
    from llmc.builder.reference import greedy
    from llmc.runtime.selftest import Probe

    longest = plan.manifest.profile.max_seq_len
    count = min(GOLDEN_TOKENS, longest // 2)
    prompts = [ids[: longest - count] for text in GOLDEN_PROMPTS if (ids := source.encode(text))]
    if not prompts:
        raise CheckpointError(f"{source.checkpoint.path}: the tokenizer turns plain English into nothing")
    expected = [greedy(source.reference, ids, count) for ids in prompts]
    answers: list[list[int] | None] = [None] * len(prompts)
    if runs_here:
        with Probe(plan) as probe:
            answers = [probe.greedy(ids, count) for ids in prompts]
    rows = zip(prompts, expected, answers, strict=True)
    return {
        "tokens": count,
        "prompts": [{"ids": ids, "hf_tokens": hf, "engine_tokens": engine} for ids, hf, engine in rows],
    }


def _quality(source: Source, plan: Plan) -> dict[str, Any]:
    """Engine beside Hugging Face at fp32 on the evaluation text; rounded, as last digits differ between machines."""
    from llmc.builder.reference import logits
    from llmc.calibration.quality import compare, evaluation_windows
    from llmc.runtime.selftest import Probe

    length = min(EVALUATION_LENGTH, plan.manifest.profile.max_seq_len)
    windows = evaluation_windows(source.encode, windows=EVALUATION_WINDOWS, length=length)
    with Probe(plan) as probe:
        quality = compare(windows, lambda ids: logits(source.reference, ids), probe.logits)
    numbers = {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(quality).items()}
    return {"run": "done", "text": "pydoc_data.topics", "windows": len(windows), "window": length, **numbers}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
