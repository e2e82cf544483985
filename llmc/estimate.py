"""The estimate of a model from its checkpoint, or from its config.json alone.

Comes in: a path, the options of a build, a workload. Goes out: an `Estimate`. Must not know: the command line.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.errors import UsageError
from llmc.builder.capacity.estimate import Estimate, ModelFacts, Workload, estimate
from llmc.builder.capacity.model import rank_facts
from llmc.flow import default_precision
from llmc.kv_cache import cache_dtype
from llmc.profiles import CudaTarget, Gpu, load_gpu, load_profile, load_target, target_names
from llmc.rounding import RoundingOptions, require_fp8, usual_head

if TYPE_CHECKING:
    from llmc.builder.checkpoint import Checkpoint

#: Tokens of a sequence unless the caller says otherwise, where the model takes as many.
CONTEXT, ANSWER = 4096, 256


def estimate_model(
    model: str | Path,
    target: str,
    *,
    gpu: str | None = None,
    precision: str | None = None,
    kv_dtype: str | None = None,
    lm_head_dtype: str | None = None,
    tp: int = 1,
    profile: str = "chat",
    context: int | None = None,
    answer: int | None = None,
    workload: Workload | None = None,
) -> Estimate:
    """`model` is a checkpoint or a folder with a config.json; no weights are read. `context` counts prompt and answer;
    `workload` has what else is asked (its prompt and answer are replaced). Raises LlmcError.
    """
    from llmc.builder.checkpoint.opening import open_config

    described, built = _machine(target, gpu)
    checkpoint = open_config(model)
    longest = checkpoint.longest
    context = context or min(CONTEXT, longest or CONTEXT)
    answer = answer or min(ANSWER, context // 2)
    if longest is not None and context > longest:
        raise UsageError(f"--context {context}: {checkpoint.path}: the model takes sequences of {longest} tokens")
    if not 0 < answer < context:
        raise UsageError(f"--answer {answer}: leaves no room for a prompt within --context {context}")
    facts = _facts(checkpoint, built, precision, cache_dtype(kv_dtype), lm_head_dtype, tp, profile, context)
    asked = replace(workload or Workload(0, 0), prompt=context - answer, answer=answer)
    return estimate(facts, described, asked)


def _machine(target: str, name: str | None) -> tuple[Gpu, CudaTarget]:
    """The named GPU, or the one that stands for the target, and the target. Raises UsageError for what does not go
    together.
    """
    built = load_target(target)
    if not isinstance(built, CudaTarget):
        known = ", ".join(name for name in target_names() if name.startswith("cuda:"))
        raise UsageError(
            f"--target {target}: speeds are estimated of GPUs alone: {known}. Of a cpu target `llmc build --dry-run` "
            "prints the memory arithmetic, and `llmc bench PLAN` measures the roofline"
        )
    gpu = load_gpu(name or built.gpu)
    if gpu.sm != built.sm:
        raise UsageError(f"--gpu {name}: {gpu.name} is sm_{gpu.sm}, and --target {target} is sm_{built.sm}; change one")
    return gpu, built


def _facts(
    checkpoint: Checkpoint,
    target: CudaTarget,
    precision: str | None,
    kv_dtype: str | None,
    lm_head_dtype: str | None,
    tp: int,
    profile: str,
    context: int,
) -> ModelFacts:
    from llmc.builder import pipeline
    from llmc.builder.cpu.cache import ObjectCache, default_folder
    from llmc.builder.trace_cache import cached_trace

    precision = precision or default_precision(checkpoint)
    require_fp8(target, precision, kv_dtype, lm_head_dtype)
    rounding = RoundingOptions(lm_head_dtype=lm_head_dtype, usual_head=usual_head(target))
    limited = checkpoint.longest is not None
    shapes = load_profile(profile, checkpoint.longest or context, target, limited, checkpoint.stretch)
    traced, _ = cached_trace(checkpoint, ObjectCache(default_folder("traces"), suffix=".trace"), shapes.max_seq_len)
    options = pipeline.CompileOptions(
        precision=precision,
        kv_dtype=kv_dtype,
        kv_scales=defaultdict(lambda: ((1.0,), (1.0,))),  # their values change no size
        tp=tp,
        fp8_activations=target.fp8_activations,
        own=checkpoint.quantization,
        lm_head_dtype=rounding.head(checkpoint, precision),
    )
    compiled = pipeline.run(traced.graph, options)
    chunk = shapes.max_num_batched_tokens
    rows = min(chunk, shapes.max_num_seqs)
    ranks = tuple(rank_facts(graph, compiled.kv_dtype, chunk, rows) for graph in compiled.graphs)
    return ModelFacts(
        checkpoint.name, precision, compiled.kv_dtype, ranks, traced.eager_launches, chunk, shapes.block_size
    )
