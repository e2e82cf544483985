"""From a checkpoint to a sealed plan: the stages of a build, one after the other.

Comes in: a `Checkpoint`, options, for fp8 a calibration table. Goes out: `engine.plan` and a `BuildReport`; or with
`dry_run` the memory arithmetic alone. Must not know: how tables are made, how an engine is run, the command line.

    checkpoint -> trace -> passes -> lower -> compile -> weights -> plan
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from llmc.artifacts import VERSION
from llmc.artifacts.calibration import OWN_HEAD, WEIGHTS, CalibrationTable
from llmc.artifacts.errors import CheckpointError, GateError
from llmc.artifacts.kv_scales import KVScaleTable
from llmc.artifacts.plan import PlanWriter, encode_manifest
from llmc.artifacts.schema import FORMAT_VERSION, BuildInfo, Manifest, ShapeProfile
from llmc.builder import pipeline
from llmc.builder.backend import Backend, backend_for, lower
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.checkpoint.source import Quantization
from llmc.builder.cpu.cache import ObjectCache, default_folder
from llmc.builder.lowered import Lowered, rank_program
from llmc.builder.memory import MemoryPlan, memory_plan
from llmc.builder.notes import build_notes
from llmc.builder.options import BuildOptions
from llmc.builder.pipeline import Compiled, CompileOptions, Stage
from llmc.builder.progress import Progress
from llmc.builder.ranges import check_ranges
from llmc.builder.report import BuildReport
from llmc.builder.trace import Traced
from llmc.builder.trace_cache import cached_trace
from llmc.builder.verdict import Verdict
from llmc.builder.verify import Verifier
from llmc.builder.weights.errors import ErrorMeter
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.placement import Member
from llmc.builder.weights.recipe import parse
from llmc.builder.weights.rounded import open_rounded, weight_name
from llmc.builder.weights.source import ModelWeights
from llmc.builder.weights.stream import write_weights
from llmc.profiles import CudaTarget, TargetDescription, load_profile, load_target

__all__ = [
    "BuildOptions",
    "BuildReport",
    "MemoryPlan",
    "Progress",
    "compile_plan",
    "dry_run",
    "resolved_profile",
    "run_stages",
]

#: LLMC_ABI_VERSION of plugins/cpu/abi.h (a test compares them).
ABI_VERSION = 4
SHARED = "weights/shared.bin"


#: Is shown the graph as traced and after each pass.
Watch = Callable[[Stage], None]
#: Asks a sealed plan: what to add to it, and whether it may be published.
SelfTest = Callable[[Path], Verdict]


@dataclass(frozen=True)
class _Front:
    """What the front half of a build makes."""

    traced: Traced
    compiled: Compiled
    lowered: Lowered
    own: Quantization | None
    kv: KVScaleTable | None


def dry_run(checkpoint: Checkpoint, options: BuildOptions) -> MemoryPlan:
    """The memory arithmetic of such a build. Traces and lowers the model; reads no weights and needs no calibration."""
    target = load_target(options.target)
    profile = resolved_profile(checkpoint, options, target)
    # The scales of activations, keys and values are constants of the code: where they come from changes no size.
    options = dataclasses.replace(options, fp8_activations="token", verify_passes=False)
    any_scales = KVScaleTable(checkpoint.digest, "none", None, defaultdict(lambda: ((1.0,), (1.0,))))
    front = _front(checkpoint, options, None, any_scales, profile, target, Progress())
    return memory_plan(front.lowered, checkpoint.name, options.precision)


def run_stages(
    checkpoint: Checkpoint,
    options: BuildOptions,
    table: CalibrationTable | None,
    kv: KVScaleTable | None,
    progress: Progress,
    watch: Watch,
    stop_after: str,
) -> None:
    """Traces the model and runs its passes up to `stop_after`, and nothing else. Raises LlmcError."""
    target = load_target(options.target)
    profile = resolved_profile(checkpoint, options, target)
    traced = _traced(checkpoint, options, profile, progress)
    with progress.stage("passes"):
        compile_options = _compile_options(checkpoint, options, target, table, kv, traced)
        for stage in pipeline.stages(traced.graph, compile_options, stop_after):
            watch(stage)


def compile_plan(
    checkpoint: Checkpoint,
    options: BuildOptions,
    table: CalibrationTable | None,
    out: Path,
    progress: Progress,
    self_test: SelfTest | None = None,
    watch: Watch = lambda stage: None,
    settings: Mapping[str, object] | None = None,
    parity: str = "not checked",
    kv: KVScaleTable | None = None,
) -> BuildReport:
    """Writes the plan. `table` is needed for fp8 with static activations, `kv` for a cache in f8e4m3. `self_test` is
    given the sealed plan before it stands at `out`; `watch` is shown what each pass makes; `settings` are the caller's
    own options, for the manifest, and `parity` its finding, for the report. Raises LlmcError; nothing stands at `out`
    then that was not there before. Of those, a GateError carries the report of the build that was not published.
    """
    target = load_target(options.target, Path(options.tactics) if options.tactics else None)
    profile = resolved_profile(checkpoint, options, target)
    backend = backend_for(target, options)
    if table is not None:
        table.check(checkpoint.digest)
    rounded = open_rounded(table)
    backend.begin()  # tracing takes one processor
    front = _front(checkpoint, options, table, kv, profile, target, progress, watch)
    source = ModelWeights(checkpoint, front.traced.buffers, rounded)
    if table is not None:
        with progress.stage("ranges"):
            check_ranges(front.traced.graph, table, source)
    finished, codes = backend.code(front.lowered, source, progress)
    front = dataclasses.replace(front, lowered=finished)
    memory = memory_plan(front.lowered, checkpoint.name, options.precision)
    with PlanWriter(out) as writer:
        for program in front.lowered.programs:
            writer.add(f"graph/rank{program.rank}.ir", str(program.graph).encode())
        for name, code in codes.items():
            writer.add(name, code)
        errors = _write_weights(writer, front, source, progress)
        for name, data in _texts(checkpoint, table, memory, front, errors).items():
            writer.add(name, data)
        build = _build_info(options, front, table, backend, settings or {})
        with progress.stage("seal"):
            manifest = writer.seal(_manifest(checkpoint, front, build))
        verdict = self_test(writer.temporary) if self_test else Verdict({}, {})
        if verdict.sections:
            manifest = writer.amend(verdict.sections)
        size = writer.temporary.stat().st_size
        notes = (*build_notes(checkpoint, front.traced.note, memory, build), *backend.notes)
        report = _report(out, size, manifest, memory, front, progress, verdict, parity, notes)
        if verdict.broken:
            raise GateError(
                f"gate failed: {'; '.join(verdict.broken)}. Nothing was published; choose a precision that keeps more, "
                f"or other bounds with --gate",
                report,
            )
        writer.publish()
    return report


def resolved_profile(checkpoint: Checkpoint, options: BuildOptions, target: TargetDescription) -> ShapeProfile:
    """The shapes that such a build is for. Raises UsageError naming the field of a profile that cannot be."""
    longest, limited = checkpoint.model_info().max_position_embeddings, checkpoint.longest is not None
    return load_profile(options.profile, longest, target, limited, checkpoint.stretch)


def _front(
    checkpoint: Checkpoint,
    options: BuildOptions,
    table: CalibrationTable | None,
    kv: KVScaleTable | None,
    profile: ShapeProfile,
    target: TargetDescription,
    progress: Progress,
    watch: Watch = lambda stage: None,
) -> _Front:
    traced = _traced(checkpoint, options, profile, progress)
    with progress.stage("passes"):
        compiled = pipeline.run(traced.graph, _compile_options(checkpoint, options, target, table, kv, traced), watch)
    with progress.stage("lower"):
        lowered = lower(compiled.graphs, profile, target, compiled.kv_dtype, compiled.vocab)
    vocab_size = checkpoint.model_info().vocab_size
    if lowered.vocab_size != vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: config.json: vocab_size is {vocab_size}, the model returns {lowered.vocab_size} logits"
        )
    return _Front(traced, compiled, lowered, checkpoint.quantization, kv)


def _traced(checkpoint: Checkpoint, options: BuildOptions, profile: ShapeProfile, progress: Progress) -> Traced:
    with progress.stage("trace"):
        folder = default_folder("traces")
        cache = ObjectCache(folder, suffix=".trace") if options.cache else None
        traced, reused = cached_trace(checkpoint, cache, profile.max_seq_len)
        if reused:
            progress.reused.append("trace")
    return traced


def _compile_options(
    checkpoint: Checkpoint,
    options: BuildOptions,
    target: TargetDescription,
    table: CalibrationTable | None,
    kv: KVScaleTable | None,
    traced: Traced,
) -> CompileOptions:
    verifier = None
    if options.verify_passes:
        source = ModelWeights(checkpoint, traced.buffers, open_rounded(table))
        verifier = Verifier(cache(lambda recipe: evaluate(parse(recipe), source)))
    return CompileOptions(
        precision=options.precision,
        kv_dtype=options.kv_dtype,
        kv_scales=None if kv is None else kv.layers,
        tp=options.tp,
        table=table,
        fp8_activations=options.fp8_activations,
        lm_head_dtype=options.lm_head_dtype,
        own=checkpoint.quantization,
        rounds_apart=isinstance(target, CudaTarget),
        verifier=verifier,
    )


def _write_weights(writer: PlanWriter, front: _Front, source: ModelWeights, progress: Progress) -> dict[str, float]:
    """Returns each rounded tensor's relative error."""
    meter = ErrorMeter()
    members: dict[str, Member] = {  # of ranks that have none in their code
        p.weights_section: p.weights for p in front.lowered.programs if p.weights.nbytes == p.weights_bytes
    }
    if front.lowered.shared.nbytes:
        members[SHARED] = front.lowered.shared
    with progress.stage("weights", sum(member.nbytes for member in members.values())) as done:
        before = 0

        def advance(written: int) -> None:
            done(before + written)

        for name, member in members.items():
            with writer.section(name) as sink:
                write_weights(member, source, sink, advance, meter=meter)
            before += member.nbytes
    return meter.errors()


def _texts(
    checkpoint: Checkpoint,
    table: CalibrationTable | None,
    memory: MemoryPlan,
    front: _Front,
    errors: Mapping[str, float],
) -> dict[str, bytes]:
    """The small sections."""
    launches = Counter(front.lowered.programs[0].operators)
    if table is not None:  # what was rounded before the build
        choices = {path: entry.choice for path, entry in table.tensors.items()}
        rounded = {weight_name(path): choice.error for path, choice in choices.items() if choice and not choice.kept}
        errors = {**errors, **{name: float(f"{error:.3g}") for name, error in rounded.items()}}
    report = {"memory": dataclasses.asdict(memory), "launches": dict(sorted(launches.items())), "weight_errors": errors}
    texts = {
        "config.json": _json(checkpoint.config),
        "tokenizer/tokenizer.json": bytes(checkpoint.tokenizer_json),
        "tokenizer/tokenizer_config.json": _json(checkpoint.tokenizer_config),
        "tokenizer/generation_config.json": _json(checkpoint.generation_config),
        "report.json": _json(report),
    }
    if checkpoint.chat_template is not None:
        texts["tokenizer/chat_template.jinja"] = checkpoint.chat_template.encode()
    if table is not None:
        texts["calibration.json"] = table.named("calibration").to_json()
    if front.kv is not None:
        texts["kv_scales.json"] = front.kv.to_json()
    return texts


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _build_info(
    options: BuildOptions,
    front: _Front,
    table: CalibrationTable | None,
    backend: Backend,
    settings: Mapping[str, object],
) -> BuildInfo:
    kv_dtype = front.compiled.kv_dtype
    config: dict[str, object] = {
        "precision": options.precision,
        "kv_dtype": kv_dtype,
        "tp": options.tp,
        "profile": front.lowered.profile.name,
        "target": str(front.lowered.target),
    }
    if options.tactics is not None:
        config["tactics"] = f"{Path(options.tactics).stem}.yaml"  # the numbers are among the flags
    libraries = {name: version(name) for name in ("numpy", "torch", "transformers")}
    libraries |= backend.libraries
    if options.precision in WEIGHTS:
        kept = front.own is not None and front.own.linears and front.own.scheme.weights == options.precision
        own = front.own.scheme if front.own is not None and kept else None
        if options.precision == "fp8":
            config["fp8_activations"] = own.activations if own else options.fp8_activations
        if options.lm_head_dtype != OWN_HEAD:
            config["lm_head_dtype"] = options.lm_head_dtype
        config[f"{options.precision}_scales"] = f"the checkpoint's ({own.name})" if own else "llmc's"
    if front.kv is not None:
        config["kv_scales"] = front.kv.source
    if table is not None:
        libraries["nvidia-modelopt"] = table.modelopt
    return BuildInfo(
        compiler=f"llmc {VERSION}",
        toolchain=backend.toolchain,
        flags=backend.flags,
        precision=options.precision,
        kv_dtype=kv_dtype,
        tp=options.tp,
        config={**config, **settings},
        libraries=libraries,
        passes=front.compiled.reports,
        launches_eager=front.traced.eager_launches,
        launches_eager_per_layer=front.traced.eager_launches_per_layer,
    )


def _manifest(checkpoint: Checkpoint, front: _Front, build: BuildInfo) -> Manifest:
    lowered = front.lowered
    return Manifest(
        format=FORMAT_VERSION,
        checkpoint=checkpoint.pin(),
        target=lowered.target.fingerprint,
        model=checkpoint.model_info(),
        profile=lowered.profile,
        build=build,
        ranks=tuple(
            rank_program(program, launches.per_layer)
            for program, launches in zip(lowered.programs, front.compiled.launches, strict=True)
        ),
        shared_weights=SHARED,
        shared_bytes=lowered.shared.nbytes,
        comm_bytes=lowered.comm_bytes,
        abi=ABI_VERSION,
        sections=(),
    )


def peak_memory() -> int:
    """The most memory that this process has held, in bytes (proc(5): VmHWM).

    `getrusage` would count what the process that started this one held, too: Linux keeps its maximum across exec.
    """
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024


def _report(
    out: Path,
    size: int,
    manifest: Manifest,
    memory: MemoryPlan,
    front: _Front,
    progress: Progress,
    verdict: Verdict,
    parity: str,
    notes: tuple[str, ...],
) -> BuildReport:
    return BuildReport(
        plan=str(out),
        published=not verdict.broken,
        digest=hashlib.sha256(encode_manifest(manifest)).hexdigest(),
        plan_bytes=size,
        seconds=dict(progress.seconds),
        peak_memory_bytes=peak_memory(),
        launches_traced=front.traced.eager_launches_per_layer,
        launches_compiled=max(launches.per_layer for launches in front.compiled.launches),
        launches_step=max(rank.launches for rank in manifest.ranks),
        launches_generic=front.compiled.launches[0].generic,
        memory=memory,
        quality=dict(verdict.quality),
        parity=parity,
        notes=notes,
        reused=tuple(progress.reused),
    )
