"""Steps over a paged cache, as kernel tests of the cuda targets take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.plugins.operator import StepContext
from tests.unit.cuda.harness import Step


def paged_step(
    lengths: Sequence[tuple[int, int]], block_size: int, rng: np.random.Generator, padded: int = 0
) -> tuple[Step, int]:
    """A step of sequences (tokens before it, tokens in it), and how many blocks there are. A sequence's blocks come in
    any order; what stands in the tables behind them leads nowhere.
    """
    needed = [-(-sum(pair) // block_size) for pair in lengths]
    order = rng.permutation(sum(needed) + 3).astype(np.int32)
    blocks = len(order)
    tables = np.full((len(lengths), max(needed) + 1), -(2**30), np.int32)
    for s, count in enumerate(needed):
        tables[s, :count], order = order[:count], order[count:]
    starts = np.cumsum([0] + [new for _, new in lengths]).astype(np.int32)
    context = StepContext(block_size, starts, np.array([sum(pair) for pair in lengths], np.int32), tables)
    return Step(context, padded=padded), blocks


def cached(step: Step, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Block and place in it of every position of a sequence."""
    c = step.context
    positions = np.arange(c.context_len[sequence])
    return c.block_tables[sequence, positions // c.block_size], positions % c.block_size
