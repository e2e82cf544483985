"""Executes any graph in numpy: the oracle for passes and kernels.

Comes in: a `Graph` (one, or one per rank), the arrays of a step, a `StepContext`, a function that gives a recipe's
value. Goes out: the returned values; the caches of the context are written. Must not know: how recipes are executed.

    batch = Batch(graph, capacities=(12, 9))            # two sequences with room for 12 and 9 tokens
    logits, = run(graph, *batch.step([[5, 6, 7], [8]]), params)   # prefill three tokens and one
    logits, = run(graph, *batch.step([[9], [10]]), params)        # decode one each
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.ir import Graph, GraphError, Node
from llmc.builder.operators import ALL
from llmc.plugins.operator import KVCache, StepContext

#: A recipe's text -> its value.
Params = Callable[[str], np.ndarray]


def run(graph: Graph, inputs: Mapping[str, np.ndarray], context: StepContext, params: Params) -> tuple[np.ndarray, ...]:
    """The graph's outputs in order. `inputs` are ids and positions i32[T] and rows i32[S], by name; a graph that
    declares a batch axis gets them reshaped. Raises GraphError where a value is of another type than its node says.
    """
    last = {name: index for index, node in enumerate(graph) for name in node.inputs}
    values: dict[str, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for index, node in enumerate(graph):
        results = _results(node, [values[name] for name in node.inputs], inputs, context, params)
        for name, kind, value in zip(node.outputs, node.types, results, strict=True):
            _check(node, name, kind, value, sizes)
            values[name] = value
        for name in dict.fromkeys(node.inputs):
            if last[name] == index and name not in graph.outputs:
                del values[name]
    return tuple(values[name] for name in graph.outputs)


def _results(node: Node, arguments: Sequence[np.ndarray], inputs: Mapping[str, np.ndarray], context: StepContext,
             params: Params) -> Sequence[np.ndarray]:  # fmt: skip
    kind = node.types[0]
    if node.op == "input":
        if node.attrs.name not in inputs:
            raise GraphError(f"input %{node.out}: no array named {node.attrs.name!r} is given")
        shape = [-1 if isinstance(d, str) else d for d in kind.shape]
        return (np.asarray(inputs[node.attrs.name], NUMPY_DTYPES[kind.dtype]).reshape(shape),)
    if node.op == "param":
        return (np.asarray(params(node.attrs.recipe)),)
    if node.op == "const":
        return (np.array(node.attrs.values, NUMPY_DTYPES[kind.dtype]).reshape([int(d) for d in kind.shape]),)
    return ALL[node.op].reference(context, node.attrs, arguments)


def _check(node: Node, name: str, kind: TensorType, value: np.ndarray, sizes: dict[str, int]) -> None:
    fits = value.ndim == kind.rank and value.dtype == NUMPY_DTYPES[kind.dtype]
    for dim, size in zip(kind.shape, value.shape, strict=False):
        fits = fits and size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)
    if not fits:
        where = f" @{node.path}" if node.path else ""
        raise GraphError(f"{node.op} %{name}{where}: declared {kind}, the value is {value.dtype}{list(value.shape)}")


def run_ranks(graphs: Sequence[Graph], inputs: Mapping[str, np.ndarray], contexts: Sequence[StepContext],
              params: Params, patience: float = 60.0) -> list[tuple[np.ndarray, ...]]:  # fmt: skip
    """Every rank's outputs. The ranks run in threads; an all_reduce adds the partials in rank order, on all alike.
    `patience`: seconds that a rank waits for the others before GraphError is raised.
    """
    if len(graphs) == 1:
        return [run(graphs[0], inputs, contexts[0], params)]
    exchange = Exchange(len(graphs), patience)
    results: list[tuple[np.ndarray, ...]] = [()] * len(graphs)
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        reduce = lambda partial: exchange.all_reduce(rank, partial)  # noqa: E731
        context = dataclasses.replace(contexts[rank], rank=rank, tp=len(graphs), all_reduce=reduce)
        try:
            results[rank] = run(graphs[rank], inputs, context, params)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(graphs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if exchange.barrier.broken:
        raise GraphError("the ranks do not agree on how many all_reduces there are")
    return results


class Exchange:
    """Where ranks that run in threads meet; each waits `patience` seconds for the others at most."""

    def __init__(self, ranks: int, patience: float) -> None:
        self.barrier = threading.Barrier(ranks, timeout=patience)
        self.slots: list[np.ndarray | None] = [None] * ranks

    def all_reduce(self, rank: int, partial: np.ndarray) -> np.ndarray:
        """The sum of all ranks' partials, in rank order."""
        self.slots[rank] = partial
        self.barrier.wait()
        parts = [slot for slot in self.slots if slot is not None]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        self.barrier.wait()
        return total


def make_context(graph: Graph, capacities: Sequence[int], block_size: int = 4, seed: int = 0,
                 kv_dtype: str = "f32") -> StepContext:  # fmt: skip
    """A context with an empty cache for every attention layer of the graph, a state for every recurrence (NaN: it is
    cleared where a sequence begins), a slot for each sequence, and block tables i32[sequences, blocks] with room for
    `capacities` tokens, in a random order over all sequences. `Batch.step` adds what a step has.
    """
    blocks = [-(-tokens // block_size) for tokens in capacities]
    order = np.random.default_rng(seed).permutation(sum(blocks)).astype(np.int32)
    tables = np.zeros((len(blocks), max(blocks)), np.int32)
    for table, own in zip(tables, np.split(order, np.cumsum(blocks)[:-1]), strict=True):
        table[: len(own)] = own
    kv = {}
    for node in graph:
        if node.op in ("attention", "rope_cache"):
            a = node.attrs
            shape = (sum(blocks), block_size, a.kv_heads)
            widths = (a.head_dim, a.head_dim if a.v_dim is None else a.v_dim)
            kv[a.layer] = KVCache(*(np.zeros((*shape, width), NUMPY_DTYPES[kv_dtype]) for width in widths))
        elif node.op == "latent_cache":  # a row is key, and its first columns are value
            a = node.attrs
            rows = np.zeros((sum(blocks), block_size, 1, a.latent + a.rope), NUMPY_DTYPES[kv_dtype])
            kv[a.layer] = KVCache(rows, rows[..., : a.latent])
    states = {}
    for node in graph:
        if (shape_of := ALL[node.op].state_shape) is not None:
            states[node.attrs.state] = np.full((len(capacities), *shape_of(node.attrs)), np.nan, np.float32)
    slots = np.random.default_rng(seed).permutation(len(capacities)).astype(np.int32)
    empty = np.zeros(0, np.int32)
    return StepContext(block_size, empty, empty, tables, kv, graph.rank, graph.tp, states=states, state_slots=slots)


@dataclass
class Batch:
    """Sequences in flight: makes the arrays and the context of one step after another over the same caches.

    `capacities` are the most tokens that each sequence will have; the other arguments are `make_context`'s.
    """

    graph: Graph
    capacities: Sequence[int]
    block_size: int = 4
    seed: int = 0
    kv_dtype: str = "f32"
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [0] * len(self.capacities)
        self._context = make_context(self.graph, self.capacities, self.block_size, self.seed, self.kv_dtype)

    def step(self, tokens: Sequence[Sequence[int]], rows: str = "last") -> tuple[dict[str, np.ndarray], StepContext]:
        """Inputs and context of a step that appends `tokens[s]` (none: the sequence sits out) to sequence s. `rows`
        says whose logits are wanted: the "last" token's of each sequence in the step, or "all".
        """
        active = [s for s, own in enumerate(tokens) if len(own)]
        counts = [len(tokens[s]) for s in active]
        starts = [self.lengths[s] for s in active]
        for s in active:
            self.lengths[s] += len(tokens[s])
            if self.lengths[s] > self.capacities[s]:
                raise ValueError(f"sequence {s} has room for {self.capacities[s]} tokens, not {self.lengths[s]}")
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = [np.arange(first, first + count) for first, count in zip(starts, counts, strict=True)]
        inputs = {
            "ids": np.concatenate([np.asarray(tokens[s]) for s in active]).astype(np.int32),
            "positions": np.concatenate(positions).astype(np.int32),
            "rows": np.arange(query_start[-1], dtype=np.int32) if rows == "all" else query_start[1:] - 1,
        }
        context = dataclasses.replace(
            self._context,
            query_start=query_start,
            context_len=np.array([self.lengths[s] for s in active], np.int32),
            block_tables=self._context.block_tables[active],
            state_slots=self._context.state_slots[active],
        )
        return inputs, context
