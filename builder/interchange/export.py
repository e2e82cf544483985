"""Writes an ONNX model and its weights for each rank: from a checkpoint's compiled graphs, or from a finished plan.

Comes in: a `Plan`, or graphs and source of weights. Goes out: two files a rank. Must not know: the command line.
Weights go from file to file a block (from a plan: a tensor) at a time; no more of the model is ever held.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from llmc.artifacts.files import disk_errors, temporary_beside
from llmc.artifacts.plan import Plan
from llmc.builder.interchange.files import rank_path
from llmc.builder.interchange.model import onnx_model
from llmc.builder.ir import Graph
from llmc.builder.plan_weights import PlanWeights, plan_weights
from llmc.builder.weights.pack import pack_nibbles
from llmc.builder.weights.placement import Member
from llmc.builder.weights.recipe import Nibbles, parse
from llmc.builder.weights.stream import Shaped, Sink, write_weights


@dataclass(frozen=True)
class Exported:
    """What was written: nodes of the graph, bytes of weights, and the two files."""

    nodes: int
    weights_bytes: int
    model: Path
    weights: Path


def export_graphs(
    graphs: Sequence[Graph], kv_dtype: str, block_size: int, source: Shaped, out: Path
) -> tuple[Exported, ...]:
    """Weights are made of the checkpoint, as their recipes say. Raises LlmcError."""
    write = lambda member, sink: write_weights(member, source, sink)  # noqa: E731
    return tuple(_write(g, kv_dtype, block_size, rank_path(out, g.rank, g.tp), write) for g in graphs)


def export_plan(plan: Plan, out: Path) -> tuple[Exported, ...]:
    """Weights are those of the plan, rounded and calibrated. Raises PlanError for a plan of a target whose weights are
    not those of the cpu target, UnsupportedError for an operator without ONNX form.
    """
    return tuple(_export_rank(stored, out) for stored in plan_weights(plan))


def _export_rank(stored: PlanWeights, out: Path) -> Exported:
    def write(member: Member, sink: Sink) -> None:
        written = 0
        for placement in member.placements:
            recipe = parse(placement.recipe)
            if isinstance(recipe, Nibbles):
                value = pack_nibbles(stored.read(str(recipe.source)))
            else:
                value = stored.read(placement.recipe)
            sink.write(bytes(placement.offset - written))
            sink.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            written = placement.offset + value.nbytes

    graph = stored.graph
    path = rank_path(out, graph.rank, graph.tp)
    return _write(graph, stored.kv_dtype, stored.profile.block_size, path, write)


def _write(
    graph: Graph, kv_dtype: str, block_size: int, out: Path, weights: Callable[[Member, Sink], None]
) -> Exported:
    """Both files stand checked and complete at their paths, or neither does. Raises RuntimeError for a model that onnx
    refuses: a defect of the translations, whatever the graph was.
    """
    data = out.with_name(f"{out.name}.data")
    made = onnx_model(graph, kv_dtype, block_size, data.name)
    folder = temporary_beside(out)  # the model names its weights' file, so both have their names there
    with disk_errors(out):
        try:
            folder.mkdir()
            with (folder / data.name).open("wb") as sink:
                weights(made.weights, sink)
            (folder / out.name).write_bytes(made.proto.SerializeToString())
            _require_valid(folder / out.name, out)
            os.replace(folder / data.name, data)
            os.replace(folder / out.name, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return Exported(len(made.proto.graph.node), made.weights.nbytes, out, data)


def _require_valid(written: Path, out: Path) -> None:
    try:
        onnx.checker.check_model(written)
    except onnx.checker.ValidationError as error:
        found = " ".join(str(error).split())  # it tells what and where in several lines
        raise RuntimeError(f"{out}: onnx refuses the model that llmc made, which is not written: {found}") from error
