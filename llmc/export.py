"""A plan or a checkpoint in formats of others: ONNX, TensorRT engines. Comes in: a path. Goes out: the files. Must not
know: the command line.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.calibration import WEIGHTS
from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.artifacts.files import require_writable, write_file
from llmc.artifacts.plan import Plan
from llmc.trt_machine import require_gpu

if TYPE_CHECKING:
    from llmc.builder.interchange.export import Exported
    from llmc.builder.trt.engine import TrtEngine


def export_onnx(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    profile: str | None = None,
    tp: int | None = None,
) -> tuple[Exported, ...]:
    """`source` is a plan, or a checkpoint whose numbers are stored as `dtype` fp32|bf16 (None: bf16, or what the
    checkpoint is quantized to) and divided among `tp` ranks (None: one). Of several ranks each has a file of its own,
    OUTPUT.rank0.onnx of OUTPUT.onnx and so on. Raises LlmcError; the file of the rank that it came at is not written
    then.
    """
    if importlib.util.find_spec("onnx") is None:
        raise EnvironmentFault("exporting needs onnx, which this environment lacks: pip install 'llmc[onnx]'")
    from llmc.builder.interchange.export import export_plan

    source, output = Path(source), Path(output)
    require_writable(output)
    if not (source.is_file() and zipfile.is_zipfile(source)):
        return _export_model(source, output, dtype, profile or "chat", tp or 1)
    for option, value in (("--dtype", dtype), ("--profile", profile), ("--tp", tp)):
        if value is not None:
            raise UsageError(f"{option} {value}: {source} is a plan, which has its own; drop {option}")
    return export_plan(Plan.open(source), output)


def export_tensorrt(plan: str | Path, output: str | Path, sm: int) -> tuple[tuple[Path, TrtEngine], ...]:
    """The steps of a plan as a serialized TensorRT engine for sm_`sm`, of several ranks one each: OUTPUT.rank0.engine
    of OUTPUT.engine and so on. Raises LlmcError, EnvironmentFault where there is no TensorRT; the file of the rank that
    it came at is not written then.
    """
    from llmc.builder.interchange.files import rank_path
    from llmc.builder.plan_weights import plan_weights
    from llmc.builder.trt.caches import cache_for
    from llmc.builder.trt.engine import build_engine
    from llmc.builder.trt.library import tensorrt_module

    output = Path(output)
    trt = tensorrt_module()
    if hasattr(trt, "plugin"):
        instead = (
            "without it, TensorRT-RTX builds for sm_89 and sm_120 (pip uninstall tensorrt, pip install tensorrt-rtx), "
            f"and --target cuda:sm_{sm} builds a plan"
        )
        require_gpu(sm, f"--sm {sm}", instead)
    require_writable(output)
    made = []
    for weights in plan_weights(Plan.open(plan)):
        graph, profile = weights.graph, weights.profile
        cache = cache_for(trt, graph, profile, weights.kv_dtype, sm)
        engine = build_engine(trt, graph, weights.read, cache, profile, sm)
        path = rank_path(output, graph.rank, graph.tp)
        write_file(path, engine.engine)
        made.append((path, engine))
    return tuple(made)


def _export_model(model: Path, output: Path, dtype: str | None, profile: str, tp: int) -> tuple[Exported, ...]:
    from llmc.builder import pipeline
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.builder.interchange.export import export_graphs
    from llmc.builder.trace import trace
    from llmc.builder.weights.source import ModelWeights
    from llmc.flow import default_precision
    from llmc.profiles import load_profile, load_target

    checkpoint = open_checkpoint(model)
    precision = dtype or default_precision(checkpoint)
    shapes = load_profile(profile, checkpoint.model_info().max_position_embeddings, load_target("cpu"))
    traced = trace(checkpoint, shapes.max_seq_len)
    options = pipeline.CompileOptions(
        precision=precision,
        tp=tp,
        fp8_activations="none" if precision not in WEIGHTS else "token",
        own=checkpoint.quantization,
    )
    compiled = pipeline.run(traced.graph, options)
    source = ModelWeights(checkpoint, traced.buffers)
    return export_graphs(compiled.graphs, compiled.kv_dtype, shapes.block_size, source, output)
