"""A plan or a checkpoint in formats of others: ONNX, TensorRT engines. Comes in: a path. Goes out: the files. Must not
know: the command line.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.calibration import WEIGHTS
from llmc.artifacts.errors import EnvironmentFault, UnsupportedError, UsageError
from llmc.artifacts.files import require_writable, write_file
from llmc.artifacts.plan import Plan

if TYPE_CHECKING:
    from llmc.builder.interchange.export import Exported
    from llmc.builder.trt.engine import TrtEngine


def export_onnx(
    source: str | Path, output: str | Path, *, dtype: str | None = None, profile: str | None = None
) -> Exported:
    """`source` is a plan, or a checkpoint whose numbers are stored as `dtype` fp32|bf16 (None: bf16, or what the
    checkpoint is quantized to). Raises LlmcError; nothing stands at `output` then that was not there before.
    """
    if importlib.util.find_spec("onnx") is None:
        raise EnvironmentFault("exporting needs onnx, which this environment lacks: pip install 'llmc[onnx]'")
    from llmc.builder.interchange.export import export_plan

    source, output = Path(source), Path(output)
    require_writable(output)
    if not (source.is_file() and zipfile.is_zipfile(source)):
        return _export_model(source, output, dtype, profile or "chat")
    for option, value in (("--dtype", dtype), ("--profile", profile)):
        if value is not None:
            raise UsageError(f"{option} {value}: {source} is a plan, which has its own; drop {option}")
    return export_plan(Plan.open(source), output)


def export_tensorrt(plan: str | Path, output: str | Path, sm: int) -> TrtEngine:
    """The decode step of a plan as a serialized TensorRT engine for sm_`sm`. Raises LlmcError, EnvironmentFault where
    there is no TensorRT; nothing stands at `output` then that was not there before.
    """
    from llmc.builder.plan_weights import PlanWeights
    from llmc.builder.trt.engine import build_engine
    from llmc.builder.trt.library import tensorrt_module

    output = Path(output)
    trt = tensorrt_module()
    require_writable(output)
    weights = PlanWeights(Plan.open(plan))
    if weights.kv_dtype != "bf16":
        raise UnsupportedError(
            f"{plan}: keys and values are {weights.kv_dtype}, and TensorRT's attention keeps bf16 here; build with "
            "--kv-cache-dtype bf16"
        )
    shapes = weights.profile
    made = build_engine(trt, weights.graph, weights.read, shapes.max_num_seqs, shapes.max_seq_len, sm)
    write_file(output, made.engine)
    return made


def _export_model(model: Path, output: Path, dtype: str | None, profile: str) -> Exported:
    from llmc.builder import pipeline
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.builder.interchange.export import export_graph
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
        fp8_activations="none" if precision not in WEIGHTS else "token",
        own=checkpoint.quantization,
    )
    compiled = pipeline.run(traced.graph, options)
    source = ModelWeights(checkpoint, traced.buffers)
    return export_graph(compiled.graphs[0], compiled.kv_dtype, shapes.block_size, source, output)
