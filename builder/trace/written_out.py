"""Attention that a model writes out in operators, recognised by what it computes and replaced by `llmc::attention`.

Comes in: an exported program of a model that does not call transformers' attention interface: softmax over [.., T, T]
scores, a product of queries and keys before it, a product with values behind it. Goes out: the same program with one
call in their place. Must not know: any model family, in which order or by which operators masks and biases are added.

What stands between the scores and the softmax depends on positions alone, or it is refused. So it is computed, on real
tensors, with scores that are chosen; scale, causal mask, window, chunks and ALiBi slopes (up to a constant for each
query, which a softmax does not see) are read off, and must reproduce other scores and every masked place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.ir import layer_of
from llmc.builder.trace.places import module_path, own_name

#: Tokens of the sequence on which masks are computed, where no window is longer.
TOKENS = 48
#: Scores below this are masked: models use the least number of a dtype, or -inf.
_MASKED = -1e4
_PRODUCTS = ("matmul", "bmm", "baddbmm")
#: What may stand between softmax and the product with values: operators that change no number.
_KEEPING = frozenset(
    {
        "to",
        "_to_copy",
        "type_as",
        "dropout",
        "clone",
        "contiguous",
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "float",
    }
)


@dataclass(frozen=True)
class _Place:
    """One attention: the product of queries and keys, the softmax, and the product with values."""

    scores: torch.fx.Node
    softmax: torch.fx.Node
    values: torch.fx.Node


@dataclass(frozen=True)
class _Rule:
    """What scores become: score * scale + slopes[h] * (key - query), for the keys that a query sees."""

    scale: float
    window: int | None
    chunk: int | None
    slopes: tuple[float, ...] | None


def writes_out(program: torch.export.ExportedProgram) -> bool:
    """Whether the program has a softmax over the keys of each token."""
    return any(_is_softmax(node) for node in program.graph.nodes)


def replace(program: torch.export.ExportedProgram, buffers: Mapping[str, torch.Tensor], longest: int) -> None:
    """Puts one `llmc::attention` in the place of each attention, in the program's own graph. `longest`: the largest
    window that the config names. Raises UnsupportedError, with the module, for one that is something else.
    """
    for number, softmax in enumerate([node for node in program.graph.nodes if _is_softmax(node)]):
        place = _place(softmax)
        queries, keys = place.scores.args[-2:] if _name(place.scores) != "baddbmm" else place.scores.args[1:3]
        rule = _rule(place, _Evaluator(program, buffers), max(TOKENS, 2 * longest))
        layer = layer_of(module_path(softmax))
        _insert(program.graph, place, (queries, keys), number if layer is None else layer, rule)


def _name(node: Any) -> str:
    return node.target._opname if isinstance(getattr(node, "target", None), torch._ops.OpOverload) else ""


def _shape(node: torch.fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _by_pairs(node: torch.fx.Node) -> bool:
    """Whether a value has a number for each query and key: its last two axes are T."""
    last = _shape(node)[-2:]
    return len(last) == 2 and not any(isinstance(d, int) for d in last)


def _is_softmax(node: torch.fx.Node) -> bool:
    return _name(node) in ("softmax", "_softmax") and _by_pairs(node)


def _refused(node: torch.fx.Node, reason: str) -> UnsupportedError:
    return UnsupportedError(f"the attention of {module_path(node) or '(model)'} cannot be compiled: {reason}")


def _place(softmax: torch.fx.Node) -> _Place:
    before, wanted = set(), list(softmax.all_input_nodes)
    found = []
    while wanted:
        node = wanted.pop()
        if node in before or not _by_pairs(node):
            continue
        before.add(node)
        if _name(node) in _PRODUCTS:
            found.append(node)
        else:
            wanted += node.all_input_nodes
    if len(found) != 1:
        raise _refused(softmax, f"its scores come from {len(found)} products of queries and keys, not one")
    behind = softmax
    while _name(behind) not in _PRODUCTS:
        users = [user for user in behind.users if _name(user) and not _name(user).startswith("_assert")]
        if len(users) != 1 or _name(users[0]) not in (*_KEEPING, *_PRODUCTS):
            raise _refused(softmax, "what it does with the weights after the softmax is no product with values")
        before_last, behind = behind, users[0]
    if behind.args[0] is not before_last:
        raise _refused(softmax, "the weights are not the left side of a product with values")
    return _Place(found[0], softmax, behind)


class _Evaluator:
    """Computes nodes of the program on real tensors: a single sequence of n tokens at positions 0..n-1."""

    def __init__(self, program: torch.export.ExportedProgram, buffers: Mapping[str, torch.Tensor]) -> None:
        signature = program.graph_signature
        self.inputs = dict(zip(signature.user_inputs, ("ids", "positions", "rows"), strict=True))
        computed = signature.non_persistent_buffers  # what others hold, a checkpoint says
        self.constants = {n: buffers[own_name(t)] for n, t in signature.inputs_to_buffers.items() if t in computed}
        self.constants |= {n: program.constants[t] for n, t in signature.inputs_to_lifted_tensor_constants.items()}

    def value(self, node: Any, tokens: int, known: dict[torch.fx.Node, Any]) -> Any:
        """The node's value; those in `known` are given, and what is computed is added to them."""
        if isinstance(node, list | tuple):
            return [self.value(item, tokens, known) for item in node]
        if isinstance(node, torch.device):
            return torch.device("cpu")
        if not isinstance(node, torch.fx.Node):
            return node
        if node not in known:
            known[node] = self._source(node, tokens) if node.op == "placeholder" else self._call(node, tokens, known)
        return known[node]

    def _source(self, node: torch.fx.Node, tokens: int) -> torch.Tensor:
        if self.inputs.get(node.name) == "positions":
            return torch.arange(tokens)[None]
        constant = self.constants.get(node.name)
        if constant is None or constant.device.type == "meta":
            raise _refused(node, f"its mask or bias depends on {own_name(node.name)}, not on positions alone")
        return constant

    def _call(self, node: torch.fx.Node, tokens: int, known: dict[torch.fx.Node, Any]) -> Any:
        first = node.args[0] if node.args else None
        if _name(node) == "sym_size" and isinstance(first, torch.fx.Node) and first not in known:
            size = _shape(first)[node.args[1]]
            return size if isinstance(size, int) else tokens
        assert callable(node.target)
        args = [self.value(a, tokens, known) for a in node.args]
        return node.target(*args, **{k: self.value(v, tokens, known) for k, v in node.kwargs.items()})


def _rule(place: _Place, evaluator: _Evaluator, tokens: int) -> _Rule:
    """Reads the rule off, and proves it on random scores."""
    shape = [tokens if not isinstance(d, int) else d for d in _shape(place.scores)]
    heads = shape[-3]

    def logits(scores: torch.Tensor) -> torch.Tensor:
        """[heads, queries, keys] before the softmax."""
        product: Any = scores
        if _name(place.scores) == "baddbmm":
            options = {"beta": 1, "alpha": 1} | place.scores.kwargs
            bias = evaluator.value(place.scores.args[0], tokens, {})
            product = options["beta"] * bias + options["alpha"] * scores
        value: torch.Tensor = evaluator.value(place.softmax.args[0], tokens, {place.scores: product})
        return value.expand(shape if value.dim() == len(shape) else (1, *shape)).reshape(heads, tokens, tokens)

    base, one = logits(torch.zeros(shape)), logits(torch.ones(shape))
    seen = base > _MASKED
    if not bool((seen == seen[:1]).all()):
        raise _refused(place.softmax, "its heads see different keys")
    window, chunk = _visible(place, seen[0])
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    relative = base - base.diagonal(dim1=1, dim2=2)[:, :, None]
    slopes = relative[:, 1, 0] / -1.0 if bool(seen[0, 1, 0]) else torch.zeros(heads)
    far = int(seen[0, -1].nonzero()[0])
    if far < tokens - 1:  # the longest distance tells a slope best
        slopes = relative[:, -1, far] / float(far - tokens + 1)
    nearest = base.abs().where(seen, torch.inf).flatten().argmin()  # the smallest bias hides the fewest digits
    scale = float((one - base).flatten()[nearest])
    trial = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    have = logits(trial) - base.diagonal(dim1=1, dim2=2)[:, :, None]
    want = trial.reshape(heads, tokens, tokens) * scale + slopes[:, None, None] * distance
    error = ((have - want).abs() / (1 + want.abs())).where(seen, 0).max()
    if not error < 1e-4:
        raise _refused(place.softmax, "its scores are more than scaled, masked and biased by distance")
    return _Rule(scale, window, chunk, tuple(slopes.tolist()) if bool(slopes.any()) else None)


def _visible(place: _Place, seen: torch.Tensor) -> tuple[int | None, int | None]:
    """(window, chunk) of the [queries, keys] that are not masked."""
    tokens = len(seen)
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    causal = key <= query
    if torch.equal(seen, causal):
        return None, None
    window = int(seen.sum(dim=1).max())
    if torch.equal(seen, causal & (query - key < window)):
        return window, None
    if torch.equal(seen, causal & (key >= query - query % window)):
        return None, window
    raise _refused(place.softmax, "its mask is neither causal nor a sliding window nor chunks")


def _insert(graph: torch.fx.Graph, place: _Place, operands: tuple[Any, Any], layer: int, rule: _Rule) -> None:
    ops = torch.ops.aten
    end = place.values

    def make(target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta = {k: v for k, v in end.meta.items() if k != "val"}
        values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        with values[0].fake_mode:
            node.meta["val"] = target(*values)
        return node

    with graph.inserting_before(end):
        queries, values = operands[0], end.args[1]
        keys = make(ops.transpose.int, operands[1], -1, -2)
        heads = [n if len(_shape(n)) == 4 else make(ops.unsqueeze.default, n, 0) for n in (queries, keys, values)]
        slopes = None if rule.slopes is None else list(rule.slopes)
        call = torch.ops.llmc.attention.default
        out = make(call, *heads, layer, rule.scale, rule.window, None, rule.chunk, slopes, None)
        out = make(ops.transpose.int, out, 1, 2)
        if len(_shape(end)) == 3:
            out = make(ops.squeeze.dim, out, 0)
    end.replace_all_uses_with(out)
