"""Writes an ONNX model and its weights: from a checkpoint's compiled graph, or from a finished plan.

Comes in: a `Plan`, or graph and source of weights. Goes out: two files. Must not know: the command line. Weights go
from file to file a block (from a plan: a tensor) at a time; no more of the model is ever held.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from llmc.artifacts.errors import PlanError
from llmc.artifacts.files import disk_errors, temporary_beside
from llmc.artifacts.plan import Plan
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.interchange.model import onnx_model
from llmc.builder.ir import Graph
from llmc.builder.page.render import lower_plan
from llmc.builder.weights.pack import unpack_panels
from llmc.builder.weights.placement import Member, Placement
from llmc.builder.weights.recipe import Panels, PanelsGated, Recipe, parse
from llmc.builder.weights.stream import Shaped, Sink, write_weights


@dataclass(frozen=True)
class Exported:
    """What was written: nodes of the graph, bytes of weights, and the two files."""

    nodes: int
    weights_bytes: int
    model: Path
    weights: Path


def export_graph(graph: Graph, kv_dtype: str, block_size: int, source: Shaped, out: Path) -> Exported:
    """Weights are made of the checkpoint, as their recipes say. Raises LlmcError."""
    return _write(graph, kv_dtype, block_size, out, lambda member, sink: write_weights(member, source, sink))


def export_plan(plan: Plan, out: Path) -> Exported:
    """Weights are those of the plan, rounded and calibrated. Raises PlanError for a plan of a target whose weights are
    not those of the cpu target, UnsupportedError for an operator without ONNX form.
    """
    if plan.manifest.target.kind != "cpu":
        raise PlanError(f"{plan.path}: is for {plan.manifest.target.kind}; build it with --target cpu to export it")
    lowered, rank = lower_plan(plan), plan.manifest.ranks[0]
    program = lowered.programs[0]
    stored = {
        **_stored(plan, rank.weights, program.weights),
        **_stored(plan, plan.manifest.shared_weights, lowered.shared),
    }

    def write(member: Member, sink: Sink) -> None:
        written = 0
        for placement in member.placements:
            shape = tuple(int(d) for d in placement.kind.shape)
            value = np.ascontiguousarray(stored[placement.recipe].read(shape))
            sink.write(bytes(placement.offset - written))
            sink.write(value.reshape(-1).view(np.uint8).data)
            written = placement.offset + value.nbytes

    return _write(program.graph, lowered.kv_dtype, lowered.profile.block_size, out, write)


@dataclass(frozen=True)
class _Stored:
    """A parameter as the plan stores it, packed for the kernels or not."""

    plan: Plan
    section: str
    placement: Placement
    packing: type[Recipe] | None

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """The parameter in its own order."""
        at = self.placement
        raw = self.plan.section(self.section)[at.offset : at.offset + at.nbytes]
        value = np.frombuffer(raw, NUMPY_DTYPES[at.kind.dtype]).reshape([int(d) for d in at.kind.shape])
        if self.packing is None:
            return value
        return unpack_panels(value, shape, gated=self.packing is PanelsGated)


def _stored(plan: Plan, section: str, member: Member) -> dict[str, _Stored]:
    """By the recipe of the parameter."""
    found = {}
    for placement in member.placements:
        recipe = parse(placement.recipe)
        if isinstance(recipe, Panels | PanelsGated):
            found[str(recipe.source)] = _Stored(plan, section, placement, type(recipe))
        else:
            found[placement.recipe] = _Stored(plan, section, placement, None)
    return found


def _write(
    graph: Graph, kv_dtype: str, block_size: int, out: Path, weights: Callable[[Member, Sink], None]
) -> Exported:
    """Both files stand complete at their paths, or neither does."""
    data = out.with_name(f"{out.name}.data")
    made = onnx_model(graph, kv_dtype, block_size, data.name)
    part, data_part = temporary_beside(out), temporary_beside(data)
    with disk_errors(out):
        try:
            with data_part.open("wb") as sink:
                weights(made.weights, sink)
            part.write_bytes(made.proto.SerializeToString())
            os.replace(data_part, data)
            os.replace(part, out)
        finally:
            part.unlink(missing_ok=True)
            data_part.unlink(missing_ok=True)
    onnx.checker.check_model(out)
    return Exported(len(made.proto.graph.node), made.weights.nbytes, out, data)
