"""A plan as one HTML page: lowers the plan's graphs again, which gives every launch, its memory and its weights.

Comes in: an open `Plan`, optionally the folder that `--dump` wrote in the same build. Goes out: HTML text without any
reference to something outside. Must not know: how a plan was traced; nothing of it is run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from llmc.artifacts.errors import PlanError, UsageError
from llmc.artifacts.plan import Plan
from llmc.artifacts.types import TensorType
from llmc.builder.alias import resolve
from llmc.builder.backend import lower
from llmc.builder.cpu.program import CpuLowered, CpuRank
from llmc.builder.cuda.program import CudaLowered, CudaRank
from llmc.builder.ir import GraphError, Node, layer_of, parse_graph
from llmc.builder.lowered import Lowered, RankCode
from llmc.builder.memory import memory_plan
from llmc.builder.operators import attrs_of
from llmc.builder.page.arena import pictures
from llmc.builder.page.costs import Cost, Step, graph_costs, kv_token_bytes, parameters
from llmc.builder.page.stages import read_stages
from llmc.builder.weights.placement import Placement
from llmc.builder.weights.recipe import leaves, parse
from llmc.profiles import load_target

#: The context of the decode whose costs are shown, where the profile has room for it.
_CONTEXT = 1024


def render(plan: Plan, dump: Path | None = None) -> str:
    """The page. Raises PlanError for a plan that this llmc cannot lower, UsageError for a dump of another build."""
    lowered = lower_again(plan)
    quality = _section(plan, "quality.json")
    report = _section(plan, "report.json")
    stages, layer = read_stages(dump, [p.graph for p in lowered.programs]) if dump is not None else ([], None)
    memory = memory_plan(lowered, plan.manifest.model.name, plan.manifest.build.precision)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"si": _si, "num": lambda n: f"{n:,}", "mb": lambda n: f"{n / 1e6:,.2f} MB"}
    template = environment.from_string(_file("page.html.jinja"))
    return template.render(
        style=Markup(_file("page.css")),
        plan=plan,
        m=plan.manifest,
        lowered=lowered,
        steps=(steps := _steps(lowered)),
        ranks=[_rank(program, steps) for program in lowered.programs],
        weights=_weights(lowered, report.get("weight_errors", {}), _section(plan, "calibration.json")),
        memory=[(line[:24].strip(), line[24:]) for line in memory.lines()[1:]],
        quality=list(_facts(quality)),
        stages=stages,
        layer=layer,
        most_nodes=max((r.nodes_before for r in plan.manifest.build.passes), default=1),
    )


def lower_plan(plan: Plan) -> CpuLowered:
    """As `lower_again`, of a plan for a CPU; any other is a UsageError."""
    lowered, target = lower_again(plan), plan.manifest.target
    if not isinstance(lowered, CpuLowered):
        raise UsageError(f"{plan.path} is for {target.kind}:{target.isa}, and this needs a plan for a CPU")
    return lowered


def lower_again(plan: Plan) -> CpuLowered | CudaLowered:
    """The plan's graphs lowered again. Raises PlanError where this llmc cannot read them, UsageError for a plan whose
    launches TensorRT has chosen.
    """
    m = plan.manifest
    if m.target.kind == "tensorrt":
        raise UsageError(
            f"{plan.path} is for {m.target.kind}:{m.target.isa}: what it launches is TensorRT's own; `llmc inspect "
            "--graph` prints its graphs"
        )
    try:
        graphs = [parse_graph(bytes(plan.section(rank.graph)).decode(), attrs_of) for rank in m.ranks]
        vocab = [(rank.vocab_start, rank.vocab_size) for rank in m.ranks]
        target = load_target(f"{m.target.kind}:{m.target.isa}")
        lowered = lower(graphs, m.profile, target, m.build.kv_dtype, vocab)
    except GraphError as error:
        raise PlanError(f"{plan.path}: written by {m.build.compiler}, and this llmc cannot read it: {error}") from error
    assert isinstance(lowered, CpuLowered | CudaLowered)
    return lowered


def _file(name: str) -> str:
    return (files(__package__) / name).read_text()


def _section(plan: Plan, name: str) -> dict[str, Any]:
    return json.loads(bytes(plan.section(name))) if name in plan else {}


def _steps(lowered: Lowered) -> dict[str, Step]:
    """The steps whose costs are shown: a decode, and the largest prefill chunk of a profile."""
    longest = lowered.profile.max_seq_len
    chunk = min(lowered.profile.max_num_batched_tokens, longest)
    return {"decode": Step(1, 1, min(_CONTEXT, longest)), "prefill": Step(chunk, 1, chunk)}


@dataclass(frozen=True)
class _LaunchRow:
    """A node with its costs by step; `number`: its first launch, of `launches`; `weight`: the type of its largest
    weight.
    """

    number: int
    launches: int
    node: Node
    layer: int | None
    weight: str
    costs: dict[str, Cost]


@dataclass(frozen=True)
class _OpRow:
    """All launches of an operator."""

    op: str
    launches: int
    costs: dict[str, Cost]


@dataclass(frozen=True)
class _WeightRow:
    """A stored form: who reads it, the tensors that it is made of, their largest error, what rounding them costs."""

    owner: str
    names: list[str]
    placement: Placement
    error: float | None
    loss: float | None


def _rank(program: CpuRank | CudaRank, steps: dict[str, Step]) -> dict[str, Any]:
    """What the page shows of a rank: its launches with their costs, sums by operator, the arena of each kind of
    steps.
    """
    graph, stored = program.graph, _stored(program)
    kv_token = kv_token_bytes(graph, program.kv_layers)
    nodes = _launched(program)
    counts = Counter(map(id, nodes))
    first_launch = {id(node): number for number, node in reversed(list(enumerate(nodes)))}
    costs = {name: graph_costs(graph, step, kv_token, stored) for name, step in steps.items()}
    params = parameters(graph)
    rows = [
        _LaunchRow(
            first_launch[id(node)],
            counts[id(node)],
            node,
            layer_of(node.path),
            _weight_type(program, node, params),
            {name: costs[name][index][1] for name in steps},
        )
        for index, (node, _) in enumerate(next(iter(costs.values())))
        if id(node) in counts
    ]
    first = min((row.layer for row in rows if row.layer is not None), default=None)
    return {
        "rank": program.rank,
        "rows": rows,
        "launches": len(nodes),
        "layer_rows": [row for row in rows if row.layer in (None, first)],
        "first": first,
        "by_op": _by_op(rows, list(steps)),
        "total": {name: sum((row.costs[name] for row in rows), Cost()) for name in steps},
        "arenas": pictures(program),
        "kv_layers": program.kv_layers,
        "kv_block_bytes": program.kv_block_bytes,
    }


def _launched(program: CpuRank | CudaRank) -> list[Node]:
    """The node of each launch of the largest steps."""
    if isinstance(program, CpuRank):
        return [launch.node for launch in program.ranges[-1].launches]
    return [launch.node for launch in program.steps[-1].launches]


def _stored(program: CpuRank | CudaRank) -> dict[str, TensorType]:
    """Values that do not lie in memory as their types say, and views of them."""
    if isinstance(program, CpuRank):
        return {}
    values, aliases = program.steps[-1].values, resolve(program.graph)
    return {
        name: replace(kind, dtype=values[root][1])
        for name, kind in program.types.items()
        if (root := aliases[name].root) in values
    }


def _weight_type(program: RankCode, node: Node, params: set[str]) -> str:
    kinds = [program.types[name] for name in node.inputs if name in params]
    return str(max(kinds, key=lambda kind: kind.nbytes(T=1, S=1))) if kinds else ""


def _by_op(rows: Sequence[_LaunchRow], steps: Sequence[str]) -> list[_OpRow]:
    """Sums by operator, those that move most bytes in the first step first."""
    own: dict[str, list[_LaunchRow]] = {}
    for row in rows:
        own.setdefault(row.node.op, []).append(row)
    found = [
        _OpRow(
            op,
            sum(row.launches for row in every),
            {name: sum((row.costs[name] for row in every), Cost()) for name in steps},
        )
        for op, every in own.items()
    ]
    return sorted(found, key=lambda row: -row.costs[steps[0]].bytes)


def _weights(lowered: Lowered, errors: dict[str, float], table: dict[str, Any]) -> dict[str, Any]:
    """Every stored form, and bytes by dtype; scales and norms among them."""
    members = [(f"rank {p.rank}", p.weights) for p in lowered.programs] + [("all ranks", lowered.shared)]
    losses = {path: entry["loss"] for path, entry in table.get("tensors", {}).items() if "loss" in entry}
    rows, by_dtype = [], dict[str, int]()
    for owner, member in members:
        for placement in member.placements:
            names = list(dict.fromkeys(leaf.name for leaf in leaves(parse(placement.recipe))))
            dtype = placement.kind.dtype
            by_dtype[dtype] = by_dtype.get(dtype, 0) + placement.nbytes
            known = [errors[name] for name in names if name in errors and dtype != "f32"]
            loss = _loss(names, losses) if dtype != "f32" else None
            rows.append(_WeightRow(owner, names, placement, max(known, default=None), loss))
    worst = max((row.error for row in rows if row.error is not None), default=0.0)
    return {"rows": rows, "by_dtype": by_dtype, "worst": worst, "losses": bool(losses)}


def _loss(names: Iterable[str], losses: dict[str, float]) -> float | None:
    """What rounding these tensors costs, in nats a token, where the calibration measured it."""
    found = [losses[module] for name in names if (module := name.removesuffix(".weight")) in losses]
    return sum(found) if found else None


def _facts(value: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """A JSON object as name and value, one a line; of lists only how long they are."""
    for key, item in value.items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(item, dict):
            yield from _facts(item, f"{name}: ")
        elif isinstance(item, list):
            yield name, f"{len(item)} entries"
        else:
            yield name, f"{item:.4g}" if isinstance(item, float) else str(item)


def _si(value: float) -> str:
    """With a prefix: 1.5 M."""
    for factor, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g} "
