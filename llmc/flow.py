"""The build from end to end: the one place that composes builder, calibration and runtime.

Comes in: a checkpoint's path and options. Goes out: `engine.plan`, a `BuildReport`. Must not know: the command line.

    checkpoint -> (calibrate) -> compile -> examine the finished engine -> gate -> publish
"""

from __future__ import annotations

from pathlib import Path

from llmc.artifacts.calibration import CalibrationTable, read_table
from llmc.artifacts.errors import CheckpointError, LlmcError, UsageError
from llmc.artifacts.files import require_writable
from llmc.artifacts.lock import pin_plan, require_lockable
from llmc.artifacts.plan import Plan
from llmc.builder.build import BuildOptions, BuildReport, MemoryPlan, Progress, compile_plan, dry_run, run_stages
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.dump import DumpFolder
from llmc.builder.pipeline import CompileOptions, pass_name, passes_until
from llmc.builder.verdict import Verdict
from llmc.examine import Exam, examine, require_judge
from llmc.gate import parse_gate
from llmc.parity import check_parity
from llmc.profiles import load_target
from llmc.source import Source


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
    gate: str | None = None,
    evaluate: bool = True,
    eval_text: str | Path | None = None,
    eval_windows: int = 12,
    eval_length: int = 512,
    verify_passes: bool = False,
    dump: str | Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Compiles `model` into the plan `output`; returns what it took and what came of it.

    `calib` is a calibration table (.json, from `llmc calibrate`) or data to calibrate with (.txt, .jsonl, a folder),
    for FP8 only. With `evaluate`, the finished engine and Hugging Face at fp32 read the same text, at most
    `eval_windows` windows of `eval_length` tokens of `eval_text` (.txt, .jsonl, a folder; default: Python's own
    documentation), and `gate` (see llmc/gate.py; None: the precision's default, "off": none) decides whether the plan
    is published. `dump` is a folder for the graph after each pass.

    Raises LlmcError, a GateError among them; nothing stands at `output` then that was not there before.
    """
    progress = progress or Progress()
    options = BuildOptions(precision=precision, tp=tp, profile=profile, target=target, verify_passes=verify_passes)
    exam = _exam(precision, gate, evaluate, eval_text, eval_windows, eval_length)
    described = load_target(target)
    require_judge(exam, described.fingerprint.features, str(described))
    source = Source(open_checkpoint(model))
    require_writable(Path(output))
    if lock is not None:
        require_lockable(Path(lock))
    watch = DumpFolder(Path(dump)) if dump is not None else lambda stage: None
    with progress.stage("hash"):
        source.checkpoint.pin()
    _check_texts(source.checkpoint)
    with progress.stage("parity"):
        parity = check_parity(source.checkpoint)
    table = _calibration(source, precision, calib, progress)

    def self_test(plan: Path) -> Verdict:
        return examine(source, plan, exam, progress)

    report = compile_plan(
        source.checkpoint, options, table, Path(output), progress, self_test, watch, parity=str(parity)
    )
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


def _exam(precision: str, gate: str | None, evaluate: bool, text: str | Path | None, windows: int, length: int) -> Exam:
    """Raises UsageError for options that contradict one another."""
    bounds = parse_gate(gate, precision)
    if not evaluate and gate is not None and bounds is not None:
        raise UsageError(f"--gate {gate} needs the comparison that --no-evaluate skips; drop one of them")
    if not evaluate and text is not None:
        raise UsageError(f"--eval {text} is for the comparison that --no-evaluate skips; drop one of them")
    if windows < 1 or length < 2:
        raise UsageError(f"the evaluation takes at least 1 window of 2 tokens, not {windows} of {length}")
    return Exam(evaluate, bounds, None if text is None else Path(text), windows, length)


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
    if source.checkpoint.quantization and source.checkpoint.quantization.linears:
        if calib is not None:
            raise UsageError(f"--calib {calib}: this checkpoint is FP8 already and brings its own scales; drop --calib")
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
