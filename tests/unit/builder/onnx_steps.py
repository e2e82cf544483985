"""An exported model run step by step in onnx's reference evaluator, over the caches of a `Batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from onnx.reference import ReferenceEvaluator

from llmc.builder.interchange.operators import cache_names
from llmc.builder.interchange.reference import reference_operators
from llmc.plugins.operator import StepContext


class OnnxSteps:
    """Keys and values are written back into the context's caches."""

    def __init__(self, path: Path, all_reduce: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
        operators = reference_operators() if all_reduce is None else reference_operators(all_reduce)
        self.evaluator = ReferenceEvaluator(str(path), new_ops=operators)

    def run(self, inputs: Mapping[str, np.ndarray], context: StepContext) -> np.ndarray:
        """f32[S, vocab]."""
        feeds = {
            **inputs,
            "query_start": context.query_start,
            "context_len": context.context_len,
            "block_tables": context.block_tables,
        }
        for layer, cache in context.kv.items():
            feeds |= dict(zip(cache_names(layer), (cache.keys, cache.values), strict=True))
        logits, *written = self.evaluator.run(None, feeds)
        after = dict(zip(self.evaluator.output_names[1:], written, strict=True))
        for layer, cache in context.kv.items():
            keys, values = (after[name] for name in cache_names(layer, 1))
            cache.keys[...] = keys
            cache.values[...] = values
        return logits
