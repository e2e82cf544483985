"""What a plug-in is: one `Operator` value that joins a signature, a type rule and a numpy reference.

Comes in: `artifacts.types`. Goes out: `Operator`, `StepContext`, `KVCache`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc.artifacts.types import TensorType


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
    `block_tables` i32[num_seqs, max_blocks]. `kv` maps a layer number to its cache.
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


@dataclass(frozen=True)
class Operator:
    """An operator of the graph. `attrs` is a frozen dataclass type; `infer(attrs, input types) -> output types`
    raises ValueError with the reason where the types do not fit; `reference(context, attrs, inputs)` is the truth.
    """

    name: str
    attrs: type
    infer: Callable[[Any, Sequence[TensorType]], tuple[TensorType, ...]]
    reference: Callable[[StepContext, Any, Sequence[np.ndarray]], tuple[np.ndarray, ...]]
    rtol: float = 1e-5
    atol: float = 1e-5
