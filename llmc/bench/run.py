"""One run of `llmc bench`: limits, systems in turn, bounds, operators; everything that is printed, drawn or written.

Comes in: a plan's path, works, peers. Goes out: a `Report`. Must not know: how to print.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmc.artifacts.machine import usable_cpus
from llmc.bench.engine import EngineSystem, engine
from llmc.bench.machine import Limits, Memory, Rates, cpu_name
from llmc.bench.peer import peer
from llmc.bench.roofline import Bound, Costs, OperatorRow, bound
from llmc.bench.work import System, Timing, Work, measure


@dataclass(frozen=True)
class SystemRow:
    """`load`: seconds until the first token; `memory` of `processes`: their peak, and the most that they held after a
    round.
    """

    name: str
    load: float
    memory: Memory
    processes: str

    def data(self) -> dict[str, Any]:
        """As plain values."""
        held, peak = self.memory.held, self.memory.peak
        return {"name": self.name, "load": self.load, "memory": held, "peak_memory": peak, "processes": self.processes}


@dataclass(frozen=True)
class OperatorTable:
    """Rank 0's launches in one step of a work. `seconds` is what the caller waits for a step with timed launches;
    `rates` the rank's part of the machine's.
    """

    work: Work
    seconds: float
    rates: Rates
    rows: tuple[OperatorRow, ...]

    @property
    def inside(self) -> float:
        """Seconds of all launches together."""
        return sum(row.seconds for row in self.rows)


@dataclass(frozen=True)
class Report:
    """`bounds`: of the plan's works. The first system is the plan, of the model `model`, with its weights in the plan's
    file (`mmap`) or copied.
    """

    model: str
    cpu: str
    limits: tuple[Rates, ...]
    systems: tuple[SystemRow, ...]
    timings: tuple[Timing, ...]
    bounds: dict[Work, Bound]
    operators: tuple[OperatorTable, ...]
    mmap: bool = True

    def timing(self, system: str, work: Work) -> Timing:
        """The one of that system at that work."""
        return next(t for t in self.timings if t.system == system and t.work == work)

    def data(self) -> dict[str, Any]:
        """As plain values: what `--json` prints."""
        plan = self.systems[0].name
        return {
            "model": self.model,
            "cpu": self.cpu,
            "mmap": self.mmap,
            "limits": [rates.data() for rates in self.limits],
            "systems": [row.data() for row in self.systems],
            "works": [_timing_data(t, self.bounds[t.work] if t.system == plan else None) for t in self.timings],
            "operators": [_operators_data(table) for table in self.operators],
        }


def _timing_data(timing: Timing, limit: Bound | None) -> dict[str, Any]:
    median, least, most = timing.rate
    found = {
        "system": timing.system,
        **asdict(timing.work),
        "seconds": timing.seconds,
        "tokens_per_second": {"median": median, "min": least, "max": most},
    }
    if limit is not None:
        taken = timing.median
        found |= {
            "bytes_read": limit.reads,
            "flops": limit.flops,
            "bytes_per_second": limit.reads / taken,
            "flops_per_second": limit.flops / taken,
            "bound_by": limit.by,
            "share_of_bound": limit.share(taken),
        }
    return found


def _operators_data(table: OperatorTable) -> dict[str, Any]:
    rows = [
        {"operator": row.op, "shape": row.kind, "launches": row.launches, "seconds": row.seconds,
         "bytes_read": limit.reads, "flops": limit.flops, "share_of_bound": limit.share(row.seconds)}
        for row in table.rows
        for limit in [bound(row.demand, table.rates)]
    ]  # fmt: skip
    return {**asdict(table.work), "seconds": table.seconds, "rows": rows}


def run(
    path: Path,
    works: Sequence[Work],
    peers: Sequence[tuple[str, Path]] = (),
    *,
    repeats: int,
    steps: int,
    profiled: Sequence[Work] = (),
    mmap: bool = True,
) -> Report:
    """Times the plan and its peers in turn, and the launches of the `profiled` works in an engine of their own. `mmap`:
    weights stay in the plan's file.

    Raises LlmcError for a plan or a peer that cannot be loaded.
    """
    threads = usable_cpus()
    with ExitStack() as stack:
        own = stack.enter_context(engine(path, works, steps, mmap=mmap))
        systems: list[System] = [own, *(stack.enter_context(peer(kind, file, threads)) for kind, file in peers)]
        costs, memory = Costs(own.plan), [Memory(0, 0)] * len(systems)
        limits = Limits(own.library, own.threads * len(own.plan.manifest.ranks), costs.products(works))

        def between() -> None:
            limits.measure()
            memory[:] = [most.most(system.memory()) for most, system in zip(memory, systems, strict=True)]

        timings = measure(systems, works, repeats, steps, between)
        between()
        rows = [SystemRow(s.name, s.load, most, s.processes) for s, most in zip(systems, memory, strict=True)]
    return Report(
        model=own.plan.manifest.model.name,
        cpu=cpu_name(),
        limits=tuple(limits.rates()),
        systems=tuple(rows),
        timings=tuple(timings),
        bounds={work: bound(costs.of(work), limits.all) for work in works},
        operators=tuple(_profile(path, costs, profiled, limits.all, repeats, mmap)),
        mmap=mmap,
    )


def _profile(
    path: Path, costs: Costs, works: Sequence[Work], rates: Rates, repeats: int, mmap: bool
) -> list[OperatorTable]:
    """Medians over repeats of a step whose launches are timed."""
    if not works:
        return []
    tables = []
    with engine(path, works, repeats, timed=True, mmap=mmap) as system:
        ranks = len(system.plan.manifest.ranks)
        own = rates.part(ranks)
        for work in works:
            system.run(work, 1)
            whole, launches = _timed_steps(system, work, repeats)
            tables.append(OperatorTable(work, whole, own, tuple(costs.operators(work, launches))))
    return tables


def _timed_steps(system: EngineSystem, work: Work, repeats: int) -> tuple[float, list[float]]:
    """Seconds of the last step of a work: the whole, and each launch of rank 0."""
    wholes, every = [], []
    for _ in range(repeats):
        wholes.append(system.run(work, 1))
        every.append(system.launch_seconds()[0])
    return statistics.median(wholes), [statistics.median(times) for times in zip(*every, strict=True)]
