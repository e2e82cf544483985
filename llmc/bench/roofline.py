"""What a plan's works must read and compute at least, and how near the machine's limits they come.

Comes in: an open plan (its graphs are lowered again; nothing is compiled), `Limits`, measured seconds. Goes out: bytes,
FLOPs, bounds, and the same by operator. Must not know: how anything was timed.

The bound of a work is the roofline's (Williams, Waterman, Patterson 2009): the longer of bytes over the rate of reads
and FLOPs over the rate of multiply-adds. Bytes are weights as stored, each once a step, and the keys and values of the
context; activations are not counted: they fit into caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.artifacts.errors import PlanError
from llmc.artifacts.plan import Plan
from llmc.bench.machine import Rates
from llmc.bench.work import Work
from llmc.builder.cpu.program import CpuLowered, CpuRank, RangeProgram
from llmc.builder.page.costs import WEIGHT_SPACES, Cost, Step, launch_costs
from llmc.builder.page.render import lower_plan


@dataclass(frozen=True)
class Bound:
    """`reads` and `flops` of one run; `seconds` that they take at least, `by` "reads" or "FLOPs"."""

    reads: int
    flops: int
    seconds: float
    by: str

    def share(self, seconds: float) -> float:
        """How much of the limit a run of so many seconds reaches."""
        return self.seconds / seconds


def bound(cost: Cost, rates: Rates) -> Bound:
    """The roofline's bound of something that costs so much."""
    reads = cost.weights + cost.kv
    by_reads, by_flops = reads / rates.reads, cost.flops / rates.flops
    return Bound(reads, cost.flops, max(by_reads, by_flops), "reads" if by_reads >= by_flops else "FLOPs")


@dataclass(frozen=True)
class OperatorRow:
    """The launches of one operator at one shape: `kind` is its largest weight's type, or its first result's. `seconds`
    and `cost` are of all of them together, in one step of one rank.
    """

    op: str
    kind: str
    launches: int
    seconds: float
    cost: Cost


class Costs:
    """The costs of a plan's works, from its graphs. Raises PlanError for a plan that this llmc lowers otherwise."""

    def __init__(self, plan: Plan) -> None:
        self._lowered: CpuLowered = lower_plan(plan)
        for program, rank in zip(self._lowered.programs, plan.manifest.ranks, strict=True):
            if len(program.ranges[0].launches) != rank.launches:
                raise PlanError(
                    f"{plan.path}: rank {rank.rank} has {rank.launches} launches, and this llmc lowers its graph to "
                    f"{len(program.ranges[0].launches)}; rebuild the plan to see what it costs"
                )

    def of(self, work: Work) -> Cost:
        """Of one run, all ranks together."""
        total = Cost()
        for step in self._steps(work):
            for program in self._lowered.programs:
                total += sum(launch_costs(program, self._range(program, step).launches, step), Cost())
        return total

    def _steps(self, work: Work) -> list[Step]:
        if work.kind == "decode":
            # The token of the step stands behind the context.
            return [Step(work.batch, work.batch, work.context + 1, work.batch)]
        most = self._lowered.profile.max_num_batched_tokens
        ends = [min(start + most, work.context) for start in range(0, work.context, most)]
        starts = [0, *ends[:-1]]
        return [Step(end - start, int(end == work.context), end) for start, end in zip(starts, ends, strict=True)]

    @staticmethod
    def _range(program: CpuRank, step: Step) -> RangeProgram:
        return next(r for r in program.ranges if r.tokens.min <= step.tokens <= r.tokens.max)

    def operators(self, work: Work, seconds: Sequence[float]) -> list[OperatorRow]:
        """Rank 0's last step of the work by operator and shape, what takes longest first; `seconds` of each launch."""
        program, step = self._lowered.programs[0], self._steps(work)[-1]
        launches = self._range(program, step).launches
        rows: dict[tuple[str, str], OperatorRow] = {}
        for launch, cost, taken in zip(launches, launch_costs(program, launches, step), seconds, strict=True):
            weights = [
                program.types[name]
                for name, place in zip(launch.node.inputs, launch.inputs, strict=True)
                if place.space in WEIGHT_SPACES
            ]
            kind = str(max(weights, key=lambda t: t.nbytes(T=1, S=1)) if weights else launch.node.types[0])
            key = launch.node.op, kind
            row = rows.get(key, OperatorRow(*key, 0, 0.0, Cost()))
            rows[key] = OperatorRow(*key, row.launches + 1, row.seconds + taken, row.cost + cost)
        return sorted(rows.values(), key=lambda row: -row.seconds)
