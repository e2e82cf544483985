"""Which form of the cache a network gets. Comes in: TensorRT's module, a graph. Goes out: a `Cache`. Must not know:
engines, files.
"""

from __future__ import annotations

from typing import Any

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import ShapeProfile
from llmc.builder.ir import Graph
from llmc.builder.trt.engine import Cache
from llmc.builder.trt.linear_cache import LinearCache
from llmc.builder.trt.paged_cache import PagedCache
from llmc.builder.trt.plugins import AotPlugins
from llmc.builder.trt.ptx import compile_ptx


def cache_for(trt: Any, graph: Graph, profile: ShapeProfile, kv_dtype: str, sm: int) -> Cache:
    """Blocks where TensorRT has plug-ins, else linear caches. Raises UnsupportedError for a dtype that those lack."""
    if hasattr(trt, "plugin"):
        return PagedCache(AotPlugins(trt.plugin, trt.DataType.FLOAT, compile_ptx), graph, profile, kv_dtype, sm)
    if kv_dtype != "bf16":
        raise UnsupportedError(
            f"{graph.name}: keys and values are {kv_dtype}, and TensorRT-RTX's attention keeps bf16 here; build with "
            "--kv-cache-dtype bf16"
        )
    return LinearCache(graph, profile.max_seq_len)
