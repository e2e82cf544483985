"""Checks passes: interprets a graph before and after, on a small ragged batch, and compares what it returns.

Comes in: graphs (one, or one per rank) and the weights. Goes out: nothing, or VerifyError with pass and deviation. Must
not know: what a pass does. On in tests; `llmc build --verify-passes` for users.

The batch has two steps: three prompts of different length; then a decode of two of them, a further chunk of the third
and a prompt that joins, so that the paged cache is read across blocks that do not lie side by side. A graph need not be
a whole model: inputs that are none of a step's arrays get random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.errors import LlmcError
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.ir import Graph
from llmc.builder.passes.rewrite import size_of

#: Largest root-mean-square deviation of the logits, as a share of their own root mean square.
#: f32 weights: only the order of additions may change. FP8: a last-bit change of an activation may round it to the
#: neighbouring E4M3 number, 1/16 away, here and there.
EXACT = 1e-4
FP8 = 3e-2
#: Sharding FP8 with per-token scales: a rank takes the scale from its own columns, so every activation rounds anew.
FP8_SHARDED = 0.15
#: INT8: the same; neighbouring numbers are 1/127 of a row's largest magnitude apart.
INT8 = 1e-2
INT8_SHARDED = 5e-2
#: What storing weights in another dtype may cost, on random tiny models too.
QUANTIZED = {"f32": EXACT, "bf16": 3e-2, "f8e4m3": 0.5, "i8": 0.1, "u4": 0.5, "f16": EXACT}

#: Tokens of each sequence in each step.
_STEPS = ((9, 1, 3, 0), (1, 1, 6, 6))
_CAPACITIES = tuple(map(sum, zip(*_STEPS, strict=True)))


class VerifyError(LlmcError):
    """A pass that changed what the model computes: a defect of the compiler, not of the input."""


@dataclass
class Verifier:
    """`params` gives a recipe's value. `deviations` collects each checked pass's deviation, in order."""

    params: Callable[[str], np.ndarray]
    seed: int = 0

    def __post_init__(self) -> None:
        self.deviations: list[tuple[str, float]] = []
        self._last: tuple[tuple[Graph, ...], list[np.ndarray]] | None = None

    def check(self, name: str, before: Sequence[Graph], after: Sequence[Graph]) -> None:
        """Raises VerifyError where a value that `after` returns deviates from that of `before` beyond the bound."""
        if tuple(before) == tuple(after):
            return
        wanted, got = self.results(before), self.results(after)
        shapes, found = [value.shape for value in wanted], [value.shape for value in got]
        if shapes != found:
            raise VerifyError(f"pass {name}: returns shapes {found} instead of {shapes}")
        deviation = max(rms(mine - theirs) / max(rms(theirs), 1e-30) for mine, theirs in zip(got, wanted, strict=True))
        self.deviations.append((name, deviation))
        bound = _bound(before, after)
        if not deviation <= bound:
            raise VerifyError(
                f"pass {name} changes what the model computes: logits deviate by {deviation:.3g} of their size, "
                f"at most {bound:.3g} is rounding; this is a defect of llmc, please report it with the model's config"
            )

    def results(self, graphs: Sequence[Graph]) -> list[np.ndarray]:
        """What the graph returns (a model: the logits of all steps' rows, over the whole vocabulary, f32[rows, V])."""
        if self._last and self._last[0] == tuple(graphs):
            return self._last[1]
        results = run_steps(graphs, self.params, self.seed)
        self._last = (tuple(graphs), results)
        return results


def rms(values: np.ndarray) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _weight_dtypes(graphs: Sequence[Graph]) -> set[str]:
    return {node.types[0].dtype for graph in graphs for node in graph if node.op == "param"}


def _bound(before: Sequence[Graph], after: Sequence[Graph]) -> float:
    old, new = _weight_dtypes(before), _weight_dtypes(after)
    if new != old:
        return max(QUANTIZED[dtype] for dtype in new)
    if not new & {"f8e4m3", "i8"}:
        return EXACT
    per_token = any(node.op == "linear" and node.attrs.x_per_token for node in after[0])
    alone, sharded = (INT8, INT8_SHARDED) if "i8" in new else (FP8, FP8_SHARDED)
    return sharded if per_token and len(before) != len(after) else alone


def run_steps(graphs: Sequence[Graph], params: Callable[[str], np.ndarray], seed: int = 0) -> list[np.ndarray]:
    """Each returned value of the two-step ragged batch as f32[rows, columns], the ranks' columns joined. The seed
    chooses tokens and inputs.
    """
    rng = np.random.default_rng(seed)
    batches = [Batch(graph, _CAPACITIES, seed=seed) for graph in graphs]
    steps: list[list[np.ndarray]] = []
    for counts in _STEPS:
        tokens = [rng.integers(0, _vocabulary(graphs[0]), count).tolist() for count in counts]
        prepared = [batch.step(tokens) for batch in batches]
        inputs = {**_others(graphs[0], prepared[0][0], rng), **prepared[0][0]}
        ranks = run_ranks(graphs, inputs, [context for _, context in prepared], params)
        steps.append(
            [_joined([value.reshape(-1, value.shape[-1]) for value in every]) for every in zip(*ranks, strict=True)]
        )
    return [np.concatenate(values) for values in zip(*steps, strict=True)]


def _joined(shards: Sequence[np.ndarray]) -> np.ndarray:
    """The ranks' columns side by side; one rank's, where all have computed the whole and the same."""
    if all(np.array_equal(shard, shards[0]) for shard in shards):
        return shards[0]
    return np.concatenate(shards, axis=-1)


def _others(graph: Graph, step: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random values for the inputs that are no arrays of a step: those of a part of a model."""
    sizes = {"T": len(step["ids"]), "S": len(step["rows"])}
    return {
        node.attrs.name: rng.standard_normal([d if isinstance(d, int) else sizes[d] for d in node.type.shape])
        for node in graph
        if node.op == "input" and node.attrs.name not in step
    }


def _vocabulary(graph: Graph) -> int:
    """How many ids the graph takes: the rows of its embedding table, 1 where it has none."""
    producers = graph.producers()
    ids = {node.out for node in graph if node.op == "input" and node.attrs.name == "ids"}
    tables = [producers[node.inputs[1]] for node in graph if node.op == "embedding" and node.inputs[0] in ids]
    return min((size_of(table.types[0].shape[0]) for table in tables), default=1)
