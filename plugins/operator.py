"""What a plug-in is: one `Operator` value that joins a signature, a type rule and a numpy reference.

Comes in: `artifacts.types`. Goes out: `Operator`, `StepContext`, `KVCache`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from llmc.artifacts.types import KVScales, TensorType


def check_scales(scales: KVScales | None, kv_heads: int) -> None:
    """Raises ValueError unless there is a positive float32 for the keys and for the values of each KV head."""
    for kind, given in zip(("keys", "values"), scales or (), strict=False):
        if len(given) != kv_heads or not all(0 < np.float32(scale) < np.inf for scale in given):
            raise ValueError(f"kv_scales of {kind} are {given}; {kv_heads} positive numbers are needed, one a KV head")


@dataclass
class KVCache:
    """One layer's blocks, as numpy sees them: `keys` and `values` are [num_blocks, block_size, kv_heads, head_dim]."""

    keys: np.ndarray
    values: np.ndarray


@dataclass
class StepContext:
    """What a step knows beside its tensors; the numpy twin of `llmc_step` in `plugins/cpu/abi.h`.

    `query_start` i32[num_seqs+1]: sequence s owns tokens query_start[s]:query_start[s+1] of this step.
    `context_len` i32[num_seqs]: tokens of sequence s in the cache once this step has written its own.
    `block_tables` i32[num_seqs, max_blocks]. `kv` maps a layer number to its cache. `states` maps a state's number to
    f32[slots, *shape], `state_slots` i32[num_seqs] says which slot of each is a sequence's.
    `rank`, `tp` and `all_reduce` serve the collectives: `all_reduce(partial) -> sum over ranks`.
    """

    block_size: int
    query_start: np.ndarray
    context_len: np.ndarray
    block_tables: np.ndarray
    kv: dict[int, KVCache] = field(default_factory=dict)
    rank: int = 0
    tp: int = 1
    all_reduce: Callable[[np.ndarray], np.ndarray] = lambda x: x
    states: dict[int, np.ndarray] = field(default_factory=dict)
    state_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def sequences(self, state: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """First token, token behind the last, and state (a view into `states`) of each sequence of the step. A state is
        zero at the start of a sequence, whatever its slot held before.
        """
        for s, (first, last) in enumerate(pairwise(map(int, self.query_start))):
            own = self.states[state][self.state_slots[s]]
            if self.context_len[s] == last - first:
                own[...] = 0
            yield first, last, own


@dataclass(frozen=True)
class Operator:
    """An operator of the graph. `attrs` is a frozen dataclass type; `infer(attrs, input types) -> output types`
    raises ValueError with the reason where the types do not fit; `reference(context, attrs, inputs)` is the truth.
    `state_shape(attrs)`, where a sequence keeps a recurrent state between steps, is its shape in f32, channels last;
    `attrs.state` numbers the state then. `targets`: the kinds of targets whose graphs have it.
    """

    name: str
    attrs: type
    infer: Callable[[Any, Sequence[TensorType]], tuple[TensorType, ...]]
    reference: Callable[[StepContext, Any, Sequence[np.ndarray]], tuple[np.ndarray, ...]]
    rtol: float = 1e-5
    atol: float = 1e-5
    state_shape: Callable[[Any], tuple[int, ...]] | None = None
    targets: tuple[str, ...] = ("cpu", "cuda")
