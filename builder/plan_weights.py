"""The graphs of a finished plan with their weights as their recipes mean them: what kernels read packed is unpacked.

Comes in: an open `Plan` of a cpu target. Goes out: `PlanWeights`, one a rank. Must not know: formats that plans are
exported to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.artifacts.errors import PlanError
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.cpu.program import CpuLowered
from llmc.builder.ir import Graph
from llmc.builder.page.render import lower_plan
from llmc.builder.weights.pack import unpack_panels
from llmc.builder.weights.placement import Member, Placement
from llmc.builder.weights.recipe import Panels, PanelsGated, Recipe, parse


@dataclass(frozen=True)
class _Stored:
    """A parameter as the plan stores it, packed for the kernels or not."""

    section: str
    placement: Placement
    packing: type[Recipe] | None


class PlanWeights:
    """One rank's graph, and its parameters by recipe; each is read when it is asked for."""

    def __init__(self, plan: Plan, lowered: CpuLowered, number: int) -> None:
        rank, program = plan.manifest.ranks[number], lowered.programs[number]
        self.graph: Graph = program.graph
        self.kv_dtype: str = lowered.kv_dtype
        self.profile: ShapeProfile = lowered.profile
        self._plan = plan
        self._shapes = {n.attrs.recipe: tuple(int(d) for d in n.type.shape) for n in self.graph if n.op == "param"}
        self._stored = {
            **_by_recipe(rank.weights, program.weights),
            **_by_recipe(plan.manifest.shared_weights, lowered.shared),
        }

    def read(self, recipe: str) -> np.ndarray:
        """The value of a parameter of the graph, in the dtype and shape of its type."""
        stored = self._stored[recipe]
        at = stored.placement
        raw = self._plan.section(stored.section)[at.offset : at.offset + at.nbytes]
        value = np.frombuffer(raw, NUMPY_DTYPES[at.kind.dtype]).reshape([int(d) for d in at.kind.shape])
        if stored.packing is None:
            return value
        return unpack_panels(value, self._shapes[recipe], gated=stored.packing is PanelsGated)


def plan_weights(plan: Plan) -> list[PlanWeights]:
    """Those of every rank. Raises PlanError for a plan of a target whose weights are not those of the cpu target."""
    kind = plan.manifest.target.kind
    if kind != "cpu":
        raise PlanError(f"{plan.path}: is for {kind}; build it with --target cpu to export it")
    lowered = lower_plan(plan)
    return [PlanWeights(plan, lowered, number) for number in range(len(lowered.programs))]


def _by_recipe(section: str, member: Member) -> dict[str, _Stored]:
    found = {}
    for placement in member.placements:
        recipe = parse(placement.recipe)
        if isinstance(recipe, Panels | PanelsGated):
            found[str(recipe.source)] = _Stored(section, placement, type(recipe))
        else:
            found[placement.recipe] = _Stored(section, placement, None)
    return found
