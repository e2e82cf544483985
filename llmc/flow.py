"""The build from end to end: the one place that composes builder, calibration and runtime.

Comes in: a checkpoint's path and options. Goes out: `engine.plan`, a `BuildReport`. Must not know: the command line.

    checkpoint -> (calibrate) -> compile -> examine the finished engine -> gate -> publish
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.calibration import WEIGHTS
from llmc.artifacts.errors import CheckpointError, LlmcError, UnsupportedError, UsageError
from llmc.artifacts.files import require_writable
from llmc.artifacts.lock import pin_plan, require_lockable
from llmc.artifacts.plan import Plan
from llmc.builder.cpu.cache import ObjectCache, default_folder
from llmc.builder.file_hashes import FileHashes
from llmc.builder.options import BuildOptions
from llmc.builder.progress import Progress
from llmc.gate import OFF, Exam, judged_as, make_exam
from llmc.kv_cache import cache_dtype, kv_table, text_for_cache_alone
from llmc.profiles import TargetDescription, TensorRtTarget, load_target
from llmc.rebuild import Builds, Inputs
from llmc.rounding import RoundingOptions, require_fp8, usual_head
from llmc.trt_machine import require_builder

if TYPE_CHECKING:
    from llmc.builder.checkpoint import Checkpoint
    from llmc.builder.memory import MemoryPlan
    from llmc.builder.report import BuildReport


def build(
    model: str | Path,
    output: str | Path = "engine.plan",
    *,
    precision: str | None = None,
    tp: int = 1,
    profile: str = "chat",
    target: str = "cpu",
    kv_dtype: str | None = None,
    calib: str | Path | None = None,
    fp8_activations: str | None = None,
    fp8_budget: float | None = None,
    lm_head_dtype: str | None = None,
    tactics: str | Path | None = None,
    lock: str | Path | None = None,
    gate: str | None = None,
    evaluate: bool = True,
    eval_text: str | Path | None = None,
    eval_windows: int = 6,
    eval_length: int = 512,
    verify_passes: bool = False,
    dump: str | Path | None = None,
    cache: bool = True,
    self_test: bool = True,
    progress: Progress | None = None,
) -> BuildReport:
    """Compiles `model` into the plan `output`; returns what it took and what came of it.

    `calib` is a calibration table (.json, from `llmc calibrate`) or data to calibrate with (.txt, .jsonl, a folder),
    for rounded weights and an FP8 cache; `fp8_activations`, `fp8_budget` and `lm_head_dtype` say how (see
    `RoundingOptions`). With `evaluate`, the finished engine and Hugging Face at fp32 read the same text, at most
    `eval_windows` windows of `eval_length` tokens of `eval_text` (.txt, .jsonl, a folder; default: Python's own
    documentation), and `gate` (see llmc/gate.py; None: the precision's default, of a GPU's engine none; "off": none)
    decides whether the plan is published. `kv_dtype` is one of KV_CACHE_DTYPES, `tactics`: see BuildOptions.
    `dump` is a folder for the graph after each pass. Without `self_test` nothing is compared, nor are answers to golden
    prompts recorded, for which Hugging Face reads all weights: for plans that are timed and thrown away.

    With `cache`, a plan at `output` that is this build already is left as it is, and stages whose inputs are those of
    an earlier build are not run again (~/.cache/llmc); the report says which.

    `precision` fp32|bf16|fp8|int8|int4; None: see `default_precision`.

    Raises LlmcError, a GateError among them; nothing stands at `output` then that was not there before.
    """
    _require_tensorrt(load_target(target))
    progress = progress or Progress()
    kv_dtype = cache_dtype(kv_dtype)
    hashes = FileHashes(_cache("files", cache))
    checkpoint = None
    if precision is None:
        checkpoint = _open(model, hashes)
        precision = default_precision(checkpoint)
    described = load_target(target)
    if gate is None and described.kind != "cpu":
        gate = OFF  # no engine for a GPU is judged unless it is asked for: few machines that build have one
    exam = make_exam(judged_as(precision, kv_dtype), gate, evaluate and self_test, eval_text, eval_windows, eval_length)
    options = BuildOptions(
        precision=precision,
        tp=tp,
        profile=profile,
        target=target,
        kv_dtype=kv_dtype,
        fp8_activations=fp8_activations or BuildOptions.fp8_activations,
        tactics=None if tactics is None else str(tactics),
        verify_passes=verify_passes,
        cache=cache,
    )
    data = None if calib is None else Path(calib)
    for_cache = text_for_cache_alone(precision, kv_dtype, data)
    rounding = RoundingOptions(
        None if for_cache else data,
        fp8_activations,
        fp8_budget,
        cache,
        described.fp8_activations,
        lm_head_dtype,
        usual_head(described),
    )
    require_fp8(described, precision, kv_dtype, lm_head_dtype)
    builds = Builds(_cache("builds", cache and dump is None), hashes)
    if lock is not None:
        require_lockable(Path(lock))
    with progress.stage("hash"):
        named = {
            "profile": profile if _is_path(profile) else None,
            "calib": calib,
            "eval": eval_text,
            "tactics": tactics,
        }
        files = {name: Path(value) for name, value in named.items() if value is not None}
        # A choice and its default can differ.
        asked = {"fp8_activations": fp8_activations, "fp8_budget": fp8_budget, "lm_head_dtype": lm_head_dtype}
        settings = {**dataclasses.asdict(options), **exam.settings(), **asked, "self_test": self_test}
        key = builds.key(Inputs(Path(model), settings, files))
        report = builds.unchanged(key, Path(output))
    if report is not None:
        report = dataclasses.replace(report, seconds=dict(progress.seconds))
    else:
        opened = checkpoint or _open(model, hashes)
        report = _build(opened, Path(output), options, exam, rounding, data, dump, progress, self_test)
        builds.remember(key, Path(output), report)
    if lock is not None:
        pin_plan(Path(lock), Plan.open(output, verify=False))
    return report


def _build(
    checkpoint: Checkpoint,
    output: Path,
    options: BuildOptions,
    exam: Exam,
    rounding: RoundingOptions,
    calib: Path | None,
    dump: str | Path | None,
    progress: Progress,
    ask: bool,
) -> BuildReport:
    """What `build` does where the plan is not there yet; `ask` says whether the engine is asked anything. Imports the
    compiler, which takes seconds.
    """
    from llmc.builder.build import compile_plan, dry_run, resolved_profile
    from llmc.builder.dump import DumpFolder
    from llmc.builder.verdict import Verdict
    from llmc.examine import cannot_run, evaluation_text, examine, require_judge
    from llmc.parity import check_parity
    from llmc.source import Source

    target = load_target(options.target)
    unable = cannot_run(target.fingerprint, options.tp)
    require_judge(exam, target.fingerprint, unable)
    longest = resolved_profile(checkpoint, options, target).max_seq_len
    source = Source(checkpoint, longest)
    require_writable(output)
    watch = DumpFolder(Path(dump)) if dump is not None else lambda stage: None
    with progress.stage("hash"):
        checkpoint.pin()
    _check_texts(checkpoint)
    with progress.stage("parity"):
        parity = check_parity(checkpoint)
    text = evaluation_text(source, exam, longest) if exam.evaluate and unable is None else None
    if options.kv_dtype == "f8e4m3" or (target.kind != "cpu" and options.precision in WEIGHTS):
        # Refuses a cache that cannot be FP8, and what has no kernels, before minutes of calibration.
        dry_run(checkpoint, dataclasses.replace(options, lm_head_dtype=rounding.head(checkpoint, options.precision)))
    table = rounding.table(checkpoint, options.precision, progress)
    kv = kv_table(source, options.kv_dtype, calib, progress, options.cache)
    options = rounding.resolve(options, table)

    def self_test(plan: Path) -> Verdict:
        return examine(source, plan, exam, text, progress) if ask else Verdict({}, {})

    settings = exam.settings()
    if options.precision == "fp8" and table is not None and table.budget is not None:
        settings["fp8_budget"] = table.budget
    return compile_plan(checkpoint, options, table, output, progress, self_test, watch, settings, str(parity), kv)


def _require_tensorrt(target: TargetDescription) -> None:
    """Before anything is read: what a TensorRT engine needs of this machine."""
    if isinstance(target, TensorRtTarget):
        require_builder(target.sm)


def default_precision(checkpoint: Checkpoint) -> str:
    """What a build that names no precision gets: bf16, or the checkpoint's own where its numbers can be kept."""
    quantization = checkpoint.quantization
    return quantization.scheme.weights if quantization and quantization.linears else "bf16"


def _open(model: str | Path, hashes: FileHashes) -> Checkpoint:
    from llmc.builder.checkpoint import open_checkpoint

    return open_checkpoint(model, hashes.sha256)


def _is_path(profile: str) -> bool:
    """A profile's name, or the path of a file (profiles/loader.py)."""
    return "/" in profile or bool(Path(profile).suffix)


def _cache(kind: str, wanted: bool) -> ObjectCache | None:
    return ObjectCache(default_folder(kind), suffix=".json") if wanted else None


def dump_passes(
    model: str | Path,
    dump: str | Path,
    stop_after: str,
    *,
    precision: str | None = None,
    tp: int = 1,
    profile: str = "chat",
    target: str = "cpu",
    calib: str | Path | None = None,
    fp8_activations: str | None = None,
    fp8_budget: float | None = None,
    lm_head_dtype: str | None = None,
    kv_dtype: str | None = None,
    verify_passes: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the graph after each pass up to `stop_after` into the folder `dump`, and no plan. Raises LlmcError.

    The options are those of `build`, of which rotary frequencies can depend on the profile's longest sequence;
    calibrates only where a pass needs it.
    """
    from llmc.builder.build import run_stages
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.builder.dump import DumpFolder
    from llmc.builder.pipeline import CompileOptions, pass_name, passes_until
    from llmc.source import Source

    progress = progress or Progress()
    data, kv_dtype = None if calib is None else Path(calib), cache_dtype(kv_dtype)
    checkpoint = open_checkpoint(model)
    precision = precision or default_precision(checkpoint)
    options = BuildOptions(precision, tp, profile, target, kv_dtype, verify_passes=verify_passes)
    names = set(map(pass_name, passes_until(CompileOptions(precision=precision, tp=tp), stop_after)))
    described = load_target(target)
    require_fp8(described, precision, kv_dtype, lm_head_dtype)
    for_cache = text_for_cache_alone(precision, kv_dtype, data)
    rounding = RoundingOptions(
        None if for_cache else data,
        fp8_activations,
        fp8_budget,
        usual=described.fp8_activations,
        lm_head_dtype=lm_head_dtype,
        usual_head=usual_head(described),
    )
    quantizes = "quantize" in names
    needed = [(*given, "quantize") for given in rounding.given().items()]
    needed += [("--kv-cache-dtype", "fp8", "fuse_attention")] if kv_dtype == "f8e4m3" else []
    for option, value, needs in needed:
        if needs not in names:
            raise UsageError(
                f"{option} {value}: {needs}, which needs it, does not run before --stop-after {stop_after}; drop "
                f"{option}"
            )
    watch = DumpFolder(Path(dump))
    table = rounding.table(checkpoint, precision, progress) if quantizes else None
    options = rounding.resolve(options, table)
    kv = kv_table(Source(checkpoint), kv_dtype, data, progress)
    run_stages(checkpoint, options, table, kv, progress, watch, stop_after)


def plan_memory(
    model: str | Path,
    *,
    precision: str | None,
    tp: int,
    profile: str,
    target: str,
    kv_dtype: str | None = None,
    lm_head_dtype: str | None = None,
) -> MemoryPlan:
    """The memory arithmetic of such a build, before any weight is read."""
    from llmc.builder.build import dry_run
    from llmc.builder.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    precision = precision or default_precision(checkpoint)
    described, kv_dtype = load_target(target), cache_dtype(kv_dtype)
    if isinstance(described, TensorRtTarget):
        raise UnsupportedError(
            f"--dry-run: {described}: TensorRT decides about the memory of activations and weights when it builds; "
            f"--dry-run --target cuda:sm_{described.sm} has the keys and values, and the weights"
        )
    require_fp8(described, precision, kv_dtype, lm_head_dtype)
    rounding = RoundingOptions(lm_head_dtype=lm_head_dtype, usual_head=usual_head(described))
    head = rounding.head(checkpoint, precision)
    options = BuildOptions(precision, tp, profile, target, kv_dtype, lm_head_dtype=head)
    return dry_run(checkpoint, options)


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
