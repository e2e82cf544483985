"""What each launch of a program moves and computes, for a step of a given size.

Comes in: a `CpuRank` or a fused graph, `Step`. Goes out: a `Cost` for each launch. Must not know: plans, HTML, how long
anything takes.

Bytes are those that must move at least once: weights as they are stored, the rows of a table that are looked up, inputs
and results as f32 or as they are stored, keys and values as the cache holds them. FLOPs count a multiplication and an
addition as two; an elementwise function counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from llmc.artifacts.schema import KVLayer
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.alias import resolve
from llmc.builder.cpu.program import CpuRank, Launch
from llmc.builder.ir import Graph, Node
from llmc.builder.passes.views import SILENT

#: Where weights lie.
WEIGHT_SPACES = ("weights", "shared")


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
class Step:
    """`sequences` compute `tokens` tokens, as many each, and then hold `context` each; logits are wanted of `rows`
    tokens.
    """

    tokens: int
    rows: int
    context: int
    sequences: int = 1

    def size(self, kind: TensorType) -> int:
        """Elements of a value."""
        return prod(d if isinstance(d, int) else {"T": self.tokens, "S": self.rows}[d] for d in kind.shape)

    def nbytes(self, kind: TensorType) -> int:
        """Bytes of a value, 4-bit numbers two in a byte as kernels read them."""
        size = self.size(kind)
        return (size + 1) // 2 if kind.dtype == "u4" else size * NUMPY_DTYPES[kind.dtype].itemsize

    def attended(self, window: int | None = None, chunk: int | None = None) -> int:
        """Pairs of a token and a position that it sees."""
        positions = range(self.context - self.each, self.context)
        return self.sequences * sum(position + 1 - first_seen(position, window, chunk) for position in positions)

    def seen(self, window: int | None = None, chunk: int | None = None) -> int:
        """Positions that any token sees, of all sequences."""
        return self.sequences * (self.context - first_seen(self.context - self.each, window, chunk))

    @property
    def each(self) -> int:
        """Tokens of a sequence."""
        return self.tokens // self.sequences


def first_seen(position: int, window: int | None, chunk: int | None) -> int:
    """The first position that a token sees (`Scoring` of paged_attention)."""
    by_window = 0 if window is None else position - window + 1
    return max(0, by_window, 0 if chunk is None else position - position % chunk)


@dataclass(frozen=True)
class Cost:
    """Bytes of `weights`, `activations` and `kv` (cache), and floating-point operations."""

    weights: int = 0
    activations: int = 0
    kv: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weights + other.weights,
            self.activations + other.activations,
            self.kv + other.kv,
            self.flops + other.flops,
        )

    @property
    def bytes(self) -> int:
        """All bytes together."""
        return self.weights + self.activations + self.kv


#: Value name -> its type.
Types = Mapping[str, TensorType]


def launch_costs(program: CpuRank, launches: tuple[Launch, ...], step: Step) -> list[Cost]:
    """The cost of each launch, in order."""
    kv_token = kv_token_bytes(program.graph, program.kv_layers)
    return [
        _cost(launch.node, program.types, [p.space in WEIGHT_SPACES for p in launch.inputs], step, kv_token)
        for launch in launches
    ]


def kv_shapes(graph: Graph) -> dict[int, KvShape]:
    """What each attention layer keeps of a token, by layer."""
    found = {}
    for node in graph:
        a = node.attrs
        if node.op == "paged_attention":
            found[a.layer] = KvShape(a.kv_heads, a.head_dim, a.value_dim, False)
        elif node.op == "latent_attention":
            found[a.layer] = KvShape(1, a.latent, a.rope, True)
    return dict(sorted(found.items()))


def kv_numbers(graph: Graph) -> dict[int, int]:
    """How many numbers of a token each attention layer keeps in the cache."""
    return {layer: shape.numbers for layer, shape in kv_shapes(graph).items()}


def kv_token_bytes(graph: Graph, layers: Iterable[KVLayer]) -> dict[int, int]:
    """Each layer's bytes of a token in the cache."""
    numbers = kv_numbers(graph)
    return {kv.layer: numbers[kv.layer] * NUMPY_DTYPES[kv.dtype].itemsize for kv in layers}


def parameters(graph: Graph) -> set[str]:
    """The names of weights, and of views of them."""
    producers = graph.producers()
    return {name for name, alias in resolve(graph).items() if producers[alias.root].op == "param"}


def graph_costs(
    graph: Graph, step: Step, kv_token: Mapping[int, int], stored: Types | None = None
) -> list[tuple[Node, Cost]]:
    """Each node of a fused graph that is launched, in order, with its cost; `kv_token`: see `kv_token_bytes`. `stored`:
    how values lie in memory where not as their types say.
    """
    types, params = {**graph.types(), **(stored or {})}, parameters(graph)
    return [
        (node, _cost(node, types, [name in params for name in node.inputs], step, kv_token))
        for node in graph
        if node.op not in SILENT
    ]


def _cost(node: Node, types: Types, weighs: list[bool], step: Step, kv_token: Mapping[int, int]) -> Cost:
    """`weighs`: which inputs are weights."""
    weights = activations = 0
    for name, is_weight in zip(node.inputs, weighs, strict=True):
        kind = types[name]
        if not is_weight:
            activations += step.nbytes(kind)
        elif node.op == "embedding":
            weights += step.size(node.types[0]) * NUMPY_DTYPES[kind.dtype].itemsize
        else:
            weights += _touched(types, node, kind, step)
    activations += sum(step.nbytes(types[name]) for name in node.outputs)
    kv, a = 0, node.attrs
    if node.op in ("rope_cache", "latent_cache"):
        kv = step.tokens * kv_token[a.layer]
    elif node.op == "paged_attention":
        kv = step.seen(a.window, a.chunk) * kv_token[a.layer]
    elif node.op == "latent_attention":
        kv = step.seen() * kv_token[a.layer]
    return Cost(weights, activations, kv, _FLOPS.get(node.op, _elements)(types, node, step))


def _touched(types: Types, node: Node, kind: TensorType, step: Step) -> int:
    """A weight's bytes; of a stack of experts those that the step's tokens can reach."""
    whole = step.nbytes(kind)
    if node.op != "grouped_linear":
        return whole
    experts, chosen = int(kind.shape[0]), step.size(types[node.inputs[1]])
    return whole * min(experts, chosen) // experts


def _elements(types: Types, node: Node, step: Step) -> int:
    return sum(map(step.size, node.types))


def _linear(types: Types, node: Node, step: Step) -> int:
    weight = types[node.inputs[1]]
    rows = step.size(types[node.inputs[0]]) // int(weight.shape[-1])
    return 2 * rows * prod(int(d) for d in weight.shape)


def _grouped(types: Types, node: Node, step: Step) -> int:
    """Each chosen expert's matrix, once for each token that chose it."""
    _, rows, columns = (int(d) for d in types[node.inputs[2]].shape)
    return 2 * step.size(types[node.inputs[1]]) * rows * columns


def _attention(types: Types, node: Node, step: Step) -> int:
    a = node.attrs
    return 2 * step.attended(a.window, a.chunk) * a.heads * (a.head_dim + a.value_dim)


def _latent(types: Types, node: Node, step: Step) -> int:
    a = node.attrs
    return 2 * step.attended() * a.heads * (2 * a.latent + a.rope)


def _heads(types: Types, node: Node, step: Step) -> int:
    return 2 * step.tokens * prod(int(d) for d in types[node.inputs[1]].shape)


def _pointwise(types: Types, node: Node, step: Step) -> int:
    return node.attrs.expr.count("(") * step.size(node.types[0])


def _nothing(types: Types, node: Node, step: Step) -> int:
    return 0


def _norm(types: Types, node: Node, step: Step) -> int:
    """Square, sum, scale and weigh each element; the residual is one addition more."""
    return (5 if node.attrs.residual else 4) * step.size(node.types[0])


#: Operator -> FLOPs. Any other operator counts one for each element of its results.
_FLOPS: dict[str, Callable[[Types, Node, Step], int]] = {
    "linear": _linear,
    "grouped_linear": _grouped,
    "head_linear": _heads,
    "paged_attention": _attention,
    "latent_attention": _latent,
    "pointwise": _pointwise,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "copy": _nothing,
    "embedding": _nothing,
    "select_rows": _nothing,
}
