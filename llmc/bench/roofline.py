"""What a plan's works must read and compute at least, and how near the machine's limits they come.

Comes in: an open plan (its graphs are lowered again; nothing is compiled), `Limits`, measured seconds. Goes out: bytes,
FLOPs, bounds, and the same by operator. Must not know: how anything was timed.

The bound of a work is the roofline's (Williams, Waterman, Patterson 2009): the longer of bytes over the rate of reads
and FLOPs over the rate of multiply-adds, each launch's over the rate of the instructions that it multiplies with. Bytes
are weights as stored, each once a step, and the keys and values of the context; activations are not counted: they fit
into caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmc.artifacts.errors import PlanError
from llmc.artifacts.plan import Plan
from llmc.bench.machine import Rates
from llmc.bench.work import Work
from llmc.builder.cpu.program import CpuLowered, CpuRank, Launch, RangeProgram
from llmc.builder.page.costs import WEIGHT_SPACES, Cost, Step, launch_costs
from llmc.builder.page.render import lower_plan
from llmc.plugins.cpu.products import Products, linear_products
from llmc.plugins.paged_attention.cpu import in_tiles
from llmc.profiles import load_cpu_target

#: Operator -> which input is the weight whose kind decides how it multiplies. Any other operator multiplies floats.
_WEIGHT = {"linear": 1, "grouped_linear": 2}


@dataclass(frozen=True)
class Demand:
    """What a launch, or many, cost; `flops`: theirs by how they multiply."""

    cost: Cost = field(default_factory=Cost)
    flops: Mapping[Products, int] = field(default_factory=dict)

    def __add__(self, other: Demand) -> Demand:
        kinds = sorted({*self.flops, *other.flops})
        flops = {kind: self.flops.get(kind, 0) + other.flops.get(kind, 0) for kind in kinds}
        return Demand(self.cost + other.cost, flops)


@dataclass(frozen=True)
class Bound:
    """`reads` and `flops` of one run; `seconds` that they take at least, `by` "reads" or "FLOPs"; how most of them
    multiply.
    """

    reads: int
    flops: int
    seconds: float
    by: str
    products: Products

    def share(self, seconds: float) -> float:
        """How much of the limit a run of so many seconds reaches."""
        return self.seconds / seconds


def bound(demand: Demand, rates: Rates) -> Bound:
    """The roofline's bound of something that costs so much."""
    reads = demand.cost.weights + demand.cost.kv
    by_reads, by_flops = reads / rates.reads, sum(n / rates.flops[kind] for kind, n in demand.flops.items())
    by = "reads" if by_reads >= by_flops else "FLOPs"
    most = max(demand.flops, key=lambda kind: demand.flops[kind])
    return Bound(reads, demand.cost.flops, max(by_reads, by_flops), by, most)


@dataclass(frozen=True)
class OperatorRow:
    """The launches of one operator at one shape: `kind` is its largest weight's type, or its first result's. `seconds`
    and `demand` are of all of them together, in one step of one rank.
    """

    op: str
    kind: str
    launches: int
    seconds: float
    demand: Demand


class Costs:
    """The costs of a plan's works, from its graphs. Raises PlanError for a plan that this llmc lowers otherwise."""

    def __init__(self, plan: Plan) -> None:
        self._lowered: CpuLowered = lower_plan(plan)
        self._target = load_cpu_target(str(self._lowered.target))
        for program, rank in zip(self._lowered.programs, plan.manifest.ranks, strict=True):
            if len(program.ranges[0].launches) != rank.launches:
                raise PlanError(
                    f"{plan.path}: rank {rank.rank} has {rank.launches} launches, and this llmc lowers its graph to "
                    f"{len(program.ranges[0].launches)}; rebuild the plan to see what it costs"
                )

    def of(self, work: Work) -> Demand:
        """Of one run, all ranks together."""
        total = Demand()
        for step in self._steps(work):
            for program in self._lowered.programs:
                total += sum(self._demands(program, step), Demand())
        return total

    def products(self, works: Sequence[Work]) -> list[Products]:
        """All that any of these works multiplies with."""
        return sorted({kind for work in works for kind in self.of(work).flops})

    def _demands(self, program: CpuRank, step: Step) -> list[Demand]:
        """Of each launch of a step."""
        launches = self._range(program, step).launches
        costs = launch_costs(program, launches, step)
        kinds = [self._products(program, launch) for launch in launches]
        return [Demand(cost, {kind: cost.flops}) for cost, kind in zip(costs, kinds, strict=True)]

    def _products(self, program: CpuRank, launch: Launch) -> Products:
        node, target = launch.node, self._target
        if node.op in _WEIGHT:
            weight = program.types[node.inputs[_WEIGHT[node.op]]]
            features = target.features if node.op == "linear" else ()  # experts have neither bf16 products nor tiles
            return linear_products(weight.dtype, int(weight.shape[-1]), features)
        if node.op == "paged_attention":
            a = node.attrs
            dtype = next(layer.dtype for layer in program.kv_layers if layer.layer == a.layer)
            tiled = in_tiles(a.head_dim, a.value_dim, dtype, target.tiles)
            return Products.BF16_TILES if tiled else Products.FLOATS
        return Products.FLOATS

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
        for launch, demand, taken in zip(launches, self._demands(program, step), seconds, strict=True):
            weights = [
                program.types[name]
                for name, place in zip(launch.node.inputs, launch.inputs, strict=True)
                if place.space in WEIGHT_SPACES
            ]
            kind = str(max(weights, key=lambda t: t.nbytes(T=1, S=1)) if weights else launch.node.types[0])
            key = launch.node.op, kind
            row = rows.get(key, OperatorRow(*key, 0, 0.0, Demand()))
            rows[key] = OperatorRow(*key, row.launches + 1, row.seconds + taken, row.demand + demand)
        return sorted(rows.values(), key=lambda row: -row.seconds)
