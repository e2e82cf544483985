"""What one step of a model costs on each rank, from its fused graphs: bytes, operations, launches.

Comes in: a fused graph a rank, cache dtype, largest step. Goes out: `RankFacts`, `StepBound`. Must not know: how a
model was opened, requests.

A step takes at least, launch after launch, the longer of bytes over bandwidth and operations over the peak rate of
their number format: the roofline (Williams, Waterman, Patterson 2009). Bytes are weights as stored and keys and values;
activations are not counted: those of one launch fit the second-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from llmc.artifacts.errors import UsageError
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.alias import resolve
from llmc.builder.arena import Life, plan_memory
from llmc.builder.ir import Graph, Node
from llmc.builder.operators import ALL
from llmc.builder.page.costs import Cost, Step, graph_costs
from llmc.builder.passes.views import SILENT
from llmc.profiles import Gpu

#: Operators that multiply by a matrix, and which of their inputs it is.
_MATRIX = {"linear": 1, "grouped_linear": 2, "head_linear": 1}
_ATTENTION = ("paged_attention", "latent_attention")
#: A weight's dtype -> the number format whose rate its products have at most; E4M3 needs an input in E4M3 too.
_FORMATS = {"f32": "bf16", "bf16": "bf16", "f8e4m3": "fp8", "u4": "bf16"}


@dataclass(frozen=True)
class StepBound:
    """What one rank does in a step, or in several together: bytes of `weights` and `kv`, operations by number format;
    `seconds` that it takes at least, of which `link_seconds` between ranks. `reads_seconds` and `compute_seconds`: had
    the step nothing else to do.
    """

    weights: int
    kv: int
    flops: Mapping[str, int]
    reads_seconds: float
    compute_seconds: float
    link_seconds: float
    seconds: float

    def __add__(self, other: StepBound) -> StepBound:
        kinds = sorted({*self.flops, *other.flops})
        return StepBound(
            self.weights + other.weights,
            self.kv + other.kv,
            {kind: self.flops.get(kind, 0) + other.flops.get(kind, 0) for kind in kinds},
            self.reads_seconds + other.reads_seconds,
            self.compute_seconds + other.compute_seconds,
            self.link_seconds + other.link_seconds,
            self.seconds + other.seconds,
        )

    @property
    def by(self) -> str:
        """What would take longer alone."""
        return "reads" if self.reads_seconds >= self.compute_seconds else "FLOPs"


@dataclass(frozen=True)
class KvShape:
    """What a layer keeps of a token: `heads` times the widths of a key and a value; `latent`: those of a latent and its
    rotated part, once for all heads.
    """

    heads: int
    first: int
    second: int
    latent: bool

    @property
    def numbers(self) -> int:
        """Of a token."""
        return self.heads * (self.first + self.second)


@dataclass(frozen=True)
class RankFacts:
    """One rank. `kv_token`: each attention layer's bytes of a token in the cache; `state_slot`: bytes that a sequence's
    recurrences keep; `activations`: bytes of the largest step's values. `matrix_bytes` and `token_flops`: what a step
    multiplies by, and the operations of one token in that, by number format.
    """

    graph: Graph
    weights: int
    kv_token: Mapping[int, int]
    state_slot: int
    activations: int
    matrix_bytes: int
    token_flops: Mapping[str, int]
    launches: int

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers."""
        return sum(self.kv_token.values())

    def bound(self, step: Step, gpu: Gpu) -> StepBound:
        """The roofline of a step. Raises UsageError where the GPU has no rate for a format of the graph."""
        types = self.graph.types()
        flops: dict[str, int] = {}
        total, seconds, compute, link = Cost(), 0.0, 0.0, 0.0
        for node, cost in graph_costs(self.graph, step, self.kv_token):
            by_flops = 0.0
            if (kind := _format(node, types)) is not None:
                flops[kind] = flops.get(kind, 0) + cost.flops
                by_flops = cost.flops / peak(gpu, kind)
            seconds += max((cost.weights + cost.kv) / gpu.bandwidth, by_flops)
            compute += by_flops
            link += _link_seconds(node, step, self.graph.tp, gpu)
            total += cost
        reads = (total.weights + total.kv) / gpu.bandwidth
        return StepBound(total.weights, total.kv, flops, reads, compute, link, seconds + link)


def rank_facts(graph: Graph, kv_dtype: str, tokens: int, rows: int) -> RankFacts:
    """`tokens` and `rows`: of the largest step."""
    step, types = Step(1, 0, 1), graph.types()
    kv_token = _kv_token(graph, kv_dtype)
    matrices = {name: types[name] for n in graph if n.op in _MATRIX and (name := n.inputs[_MATRIX[n.op]])}
    flops: dict[str, int] = {}
    for node, cost in graph_costs(graph, Step(1, 1, 1), kv_token):
        kind = _format(node, types)
        if node.op in _MATRIX and kind is not None:
            flops[kind] = flops.get(kind, 0) + cost.flops
    params = {n.attrs.recipe: n.type for n in graph if n.op == "param"}
    return RankFacts(
        graph=graph,
        weights=sum(map(step.nbytes, params.values())),
        kv_token=kv_token,
        state_slot=sum(4 * prod(shape_of(n.attrs)) for n in graph if (shape_of := ALL[n.op].state_shape) is not None),
        activations=_arena_bytes(graph, tokens, rows),
        matrix_bytes=sum(map(step.nbytes, matrices.values())),
        token_flops=flops,
        launches=sum(n.op not in SILENT for n in graph),
    )


def slowest(ranks: Sequence[RankFacts], step: Step, gpu: Gpu) -> StepBound:
    """The bound of the rank that the others wait for."""
    return max((rank.bound(step, gpu) for rank in ranks), key=lambda bound: bound.seconds)


def kv_shapes(graph: Graph) -> dict[int, KvShape]:
    """What each attention layer keeps of a token, by layer."""
    found = {}
    for node in graph:
        if node.op in _ATTENTION:
            a = node.attrs
            latent = node.op == "latent_attention"
            widths = (a.latent, a.rope) if latent else (a.head_dim, a.value_dim)
            found[a.layer] = KvShape(1 if latent else a.kv_heads, *widths, latent)
    return dict(sorted(found.items()))


def _kv_token(graph: Graph, kv_dtype: str) -> dict[int, int]:
    size = NUMPY_DTYPES[kv_dtype].itemsize
    return {layer: shape.numbers * size for layer, shape in kv_shapes(graph).items()}


def _arena_bytes(graph: Graph, tokens: int, rows: int) -> int:
    """Of a step's values, each as its type says, those that do not live at once in one place."""
    aliases, types = resolve(graph), graph.types()
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, node in enumerate(n for n in graph if n.op not in SILENT):
        first |= dict.fromkeys(node.outputs, index)
        last |= dict.fromkeys([*node.outputs, *(aliases[name].root for name in node.inputs)], index)
    lives = (Life(name, types[name].nbytes(T=tokens, S=rows), at, last[name]) for name, at in first.items())
    return plan_memory(lives).nbytes


def _format(node: Node, types: Mapping[str, TensorType]) -> str | None:
    """The number format that a node's operations are counted in; None for those of no matrix product, which hide behind
    memory. Raises UsageError for INT8, which GPUs' descriptions have no rate of.
    """
    if node.op in _ATTENTION:
        return "bf16"
    if node.op not in _MATRIX:
        return None
    weight = types[node.inputs[_MATRIX[node.op]]].dtype
    if weight not in _FORMATS:
        raise UsageError(f"weights in {weight} ({node.path}): a GPU's rate for them is not known; use --fp8 or --dtype")
    kind = _FORMATS[weight]
    rounds_input = getattr(node.attrs, "x_per_token", False) or getattr(node.attrs, "x_scale", None) is not None
    return "bf16" if kind == "fp8" and not rounds_input else kind


def peak(gpu: Gpu, kind: str) -> float:
    """Operations a second in a number format. Raises UsageError where the GPU has none of it."""
    rate = gpu.fp8_flops if kind == "fp8" else gpu.bf16_flops
    if rate is None:
        raise UsageError(f"{gpu.name} (sm_{gpu.sm}) multiplies no FP8: choose --dtype bf16, or a target from sm_89 on")
    return rate


def _link_seconds(node: Node, step: Step, tp: int, gpu: Gpu) -> float:
    """A ring all-reduce of f32 sends each rank 2 (tp - 1) / tp of the result."""
    if tp == 1 or not (node.op == "all_reduce" or getattr(node.attrs, "all_reduce", False)):
        return 0.0
    return 2 * (tp - 1) / tp * step.nbytes(node.types[0]) / gpu.link
