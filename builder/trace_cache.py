"""The traced graph by what it was traced from: the same model with another profile, target or precision is not traced
again.

Comes in: a `Checkpoint`, a cache. Goes out: `Traced`. Must not know: passes, what a graph is for.

A trace depends on the config (with some rules for rotary frequencies, also on the longest sequence of the profile), on
the stored tensors' names and shapes, and on torch, transformers and llmc; no weight is looked at. The graph's text form
reads back as the same graph, so a plan's bytes do not depend on the cache.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name then
import msgspec
import numpy as np

from llmc.builder.checkpoint import Checkpoint
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.ir import parse_graph
from llmc.builder.operators import attrs_of
from llmc.builder.sources import sources_digest
from llmc.builder.trace import Traced, trace
from llmc.builder.trace.frequencies import may_depend_on_length


class _Array(msgspec.Struct, frozen=True):
    """A constant of the traced model."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Entry(msgspec.Struct, frozen=True):
    """A `Traced` as plain data."""

    graph: str
    architecture: str
    buffers: dict[str, _Array]
    eager_launches: int
    eager_launches_per_layer: float
    note: str


def cached_trace(checkpoint: Checkpoint, cache: ObjectCache | None, longest: int) -> tuple[Traced, bool]:
    """What `trace` gives, and whether it was there already. Raises what `trace` raises, which is not remembered."""
    if cache is None:
        return trace(checkpoint, longest), False
    key = _key(checkpoint, longest)
    found = cache.get(key)
    if found is not None:
        return _read(found), True
    made = trace(checkpoint, longest)
    cache.put(key, _write(made))
    cache.prune()
    return made, False


def _key(checkpoint: Checkpoint, longest: int) -> str:
    parts = {
        "config": checkpoint.config,
        "longest": longest if may_depend_on_length(checkpoint.config) else None,
        "tensors": {name: [str(info.dtype), list(info.shape)] for name, info in checkpoint.tensors.items()},
        "libraries": [version(name) for name in ("numpy", "torch", "transformers")],
        "llmc": sources_digest(("artifacts", "plugins", "builder")),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _write(made: Traced) -> bytes:
    buffers = {
        name: _Array(value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())
        for name, value in made.buffers.items()
    }
    entry = _Entry(
        str(made.graph), made.architecture, buffers, made.eager_launches, made.eager_launches_per_layer, made.note
    )
    return msgspec.msgpack.encode(entry)


def _read(data: bytes) -> Traced:
    entry = msgspec.msgpack.decode(data, type=_Entry)
    buffers = {
        name: np.frombuffer(value.data, np.dtype(value.dtype)).reshape(value.shape)
        for name, value in entry.buffers.items()
    }
    graph = parse_graph(entry.graph, attrs_of)
    return Traced(graph, entry.architecture, buffers, entry.eager_launches, entry.eager_launches_per_layer, entry.note)
