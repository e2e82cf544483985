"""Checks passes: runs a graph before and after in the interpreter, on a small ragged batch, and compares the logits.

Comes in: graphs (one, or one per rank) and the weights. Goes out: nothing, or VerifyError with pass and deviation. Must
not know: what a pass does. On in tests; `llmc build --verify-passes` for users.

The batch has two steps: three prompts of different length; then a decode of two of them, a further chunk of the third
and a prompt that joins, so that the paged cache is read across blocks that do not lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
#: What storing weights in another dtype may cost, on random tiny models too.
QUANTIZED = {"f32": EXACT, "bf16": 3e-2, "f8e4m3": 0.5}

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
        self._last: tuple[tuple[Graph, ...], np.ndarray] | None = None

    def check(self, name: str, before: Sequence[Graph], after: Sequence[Graph]) -> None:
        """Raises VerifyError where the logits of `after` deviate from those of `before` by more than the bound."""
        if tuple(before) == tuple(after):
            return
        wanted, got = self.logits(before), self.logits(after)
        if wanted.shape != got.shape:
            raise VerifyError(f"pass {name}: logits of shape {got.shape} instead of {wanted.shape}")
        deviation = rms(got - wanted) / max(rms(wanted), 1e-30)
        self.deviations.append((name, deviation))
        bound = _bound(before, after)
        if not deviation <= bound:
            raise VerifyError(
                f"pass {name} changes what the model computes: logits deviate by {deviation:.3g} of their size, "
                f"at most {bound:.3g} is rounding; this is a defect of llmc, please report it with the model's config"
            )

    def logits(self, graphs: Sequence[Graph]) -> np.ndarray:
        """The logits of all steps' rows, over the whole vocabulary: f32[rows, V]."""
        if self._last and self._last[0] == tuple(graphs):
            return self._last[1]
        result = run_steps(graphs, self.params, self.seed)
        self._last = (tuple(graphs), result)
        return result


def rms(values: np.ndarray) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _weight_dtypes(graphs: Sequence[Graph]) -> set[str]:
    return {node.types[0].dtype for graph in graphs for node in graph if node.op == "param"}


def _bound(before: Sequence[Graph], after: Sequence[Graph]) -> float:
    old, new = _weight_dtypes(before), _weight_dtypes(after)
    if new != old:
        return max(QUANTIZED[dtype] for dtype in new)
    if "f8e4m3" not in new:
        return EXACT
    per_token = any(node.op == "linear" and node.attrs.x_per_token for node in after[0])
    return FP8_SHARDED if per_token and len(before) != len(after) else FP8


def run_steps(graphs: Sequence[Graph], params: Callable[[str], np.ndarray], seed: int = 0) -> np.ndarray:
    """The logits f32[rows, V] of the two-step ragged batch, the ranks' columns joined. The seed chooses the tokens."""
    rng = np.random.default_rng(seed)
    batches = [Batch(graph, _CAPACITIES, seed=seed) for graph in graphs]
    rows: list[np.ndarray] = []
    for counts in _STEPS:
        tokens = [rng.integers(0, _vocabulary(graphs[0]), count).tolist() for count in counts]
        inputs, contexts = [], []
        for batch in batches:
            arrays, context = batch.step(tokens)
            inputs.append(arrays)
            contexts.append(context)
        shards = [
            outputs[0].reshape(-1, outputs[0].shape[-1]) for outputs in run_ranks(graphs, inputs[0], contexts, params)
        ]
        rows.append(shards[0] if _whole_head(graphs) else np.concatenate(shards, axis=-1))
    return np.concatenate(rows)


def _whole_head(graphs: Sequence[Graph]) -> bool:
    """Whether every rank returns the whole vocabulary: then all ranks run the head with one and the same weight."""
    return all(size_of(g.types()[g.outputs[0]].shape[-1]) == _vocabulary(g) for g in graphs)


def _vocabulary(graph: Graph) -> int:
    """Rows of the embedding table: the ids that a model takes."""
    producers = graph.producers()
    tables = [producers[node.inputs[1]] for node in graph if node.op == "embedding" and node.inputs[0] == _ids(graph)]
    return size_of(tables[0].types[0].shape[0])


def _ids(graph: Graph) -> str:
    return next(node.out for node in graph if node.op == "input" and node.attrs.name == "ids")
