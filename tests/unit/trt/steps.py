"""Steps of a `Batch` as the arrays of a TensorRT network, over linear caches or the context's blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.ir import Graph
from llmc.plugins.operator import StepContext

BF16 = NUMPY_DTYPES["bf16"]


class LinearCaches:
    """Keys and values of sequences 0..count-1, with garbage where nothing was written."""

    def __init__(self, graph: Graph, count: int, max_context: int) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        for node in graph:
            if node.op == "rope_cache":
                shape = (count, node.attrs.kv_heads, max_context, node.attrs.head_dim)
                self.arrays |= {f"{kind}.{node.attrs.layer}": np.full(shape, 7, BF16) for kind in ("keys", "values")}

    def feeds(self, inputs: Mapping[str, np.ndarray], context: StepContext, active: list[int]) -> dict[str, np.ndarray]:
        """`active`: which sequences are in the step."""
        counts = np.diff(context.query_start)
        padded = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        sequence = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(counts.sum()) - context.query_start[sequence]
        return {
            **inputs,
            "query_start": context.query_start,
            "write_index": (context.context_len - counts).astype(np.int32),
            "query_index": (context.query_start[:-1, None] + padded).astype(np.int32),
            "query_place": (sequence * counts.max() + place).astype(np.int32),
            **{name: array[active] for name, array in self.arrays.items()},
        }

    def write(self, outputs: Mapping[str, np.ndarray], active: list[int]) -> None:
        """Takes over what the step has written."""
        for name, array in self.arrays.items():
            array[active] = outputs[f"{name}.out"]


class Pools:
    """Blocks as the cuda targets lay them out, beside a context's own, and block tables with room for all."""

    def __init__(self, graph: Graph, context: StepContext, kv_dtype: str, width: int) -> None:
        self.width = width
        blocks, size = int(context.block_tables.max()) + 1, context.block_size
        self.arrays: dict[str, np.ndarray] = {}
        for node in graph:
            if node.op == "rope_cache":
                a = node.attrs
                elements = a.kv_heads * (a.head_dim + a.value_dim) * size
                self.arrays[f"kv.{a.layer}"] = np.full((blocks, elements), 7, NUMPY_DTYPES[kv_dtype])

    def feeds(self, inputs: Mapping[str, np.ndarray], context: StepContext) -> dict[str, np.ndarray]:
        """Of a step."""
        counts = np.diff(context.query_start)
        tables = np.zeros((len(counts), self.width), np.int32)
        tables[:, : context.block_tables.shape[1]] = context.block_tables
        return {
            **inputs,
            "sequence": np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            "query_start": context.query_start,
            "context_len": context.context_len,
            "block_tables": tables,
            **self.arrays,
        }

    def write(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Takes over what the step has written."""
        self.arrays = {name: outputs[f"{name}.out"] for name in self.arrays}
