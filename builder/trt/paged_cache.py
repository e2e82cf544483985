"""Keys and values in blocks, read and written by plug-ins: the Triton kernels of the cuda targets. Comes in: a `Node`,
an `Emitter`. Goes out: tensors, and a network's inputs. Must not know: engines, files.

A layer's pool is [num_blocks, elements of a block], as the cuda targets lay a block out: an input of the network, and
under the name `NAME.out` an output in the same memory. The arrays of a step are those of the cuda targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.types import NUMPY_DTYPES, Dim, TensorType
from llmc.builder.cuda.variant import variant
from llmc.builder.ir import Graph, Node
from llmc.builder.trt.emitter import Emitter
from llmc.builder.trt.plugin_kernel import POOL, WRITTEN, plugin_kernel
from llmc.builder.trt.plugins import AotPlugins
from llmc.plugins import cuda_launch
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.paged_attention.cuda import layer_bytes
from llmc.profiles import CudaTarget, load_target

#: Operators of the cache -> whether they write it.
_WRITES = {"rope_cache": True, "paged_attention": False}
OPERATORS = tuple(_WRITES)
POOL_PREFIX = "kv."


class PagedCache:
    """`inputs`: name -> dtype and shape of the arrays that a step has, some of them inputs of the graph itself.
    `layers`: the operators of the cache.
    """

    def __init__(self, plugins: AotPlugins, graph: Graph, profile: ShapeProfile, kv_dtype: str, sm: int) -> None:
        self._plugins, self._profile, self._kv_dtype = plugins, profile, kv_dtype
        tokens = (1, profile.max_num_batched_tokens)
        self._env = CudaEnv(sm, tokens, decode=False, block_size=profile.block_size, kv_dtype=kv_dtype)
        described = load_target(f"cuda:sm_{sm}")
        assert isinstance(described, CudaTarget)
        self._tactics = described.tactics  # the kernels are those of the cuda target
        blocks = -(-profile.max_seq_len // profile.block_size)
        self.inputs: dict[str, tuple[str, tuple[Dim, ...]]] = {
            "positions": ("i32", ("T",)),
            "sequence": ("i32", ("T",)),
            "query_start": ("i32", ("num_seqs_and_1",)),
            "context_len": ("i32", ("num_seqs",)),
            "block_tables": ("i32", ("num_seqs", blocks)),
        }
        size = NUMPY_DTYPES[kv_dtype].itemsize
        for node in graph:
            if node.op == "rope_cache":
                self.inputs[pool_name(node)] = (kv_dtype, ("num_blocks", self._layer_bytes(node) // size))
        self.layers: Mapping[str, Callable[[Emitter, Node], list[Any]]] = dict.fromkeys(_WRITES, self._layer)

    def _layer(self, e: Emitter, node: Node) -> list[Any]:
        """Raises ValueError for what takes more than one launch, or a form that the kernels have not."""
        types = [e.types[name] for name in node.inputs]
        launch = cuda_launch(node.op)
        assert launch is not None
        tactics = self._tactics.get(node.op, {})
        env = replace(self._env, kv_block_bytes=self._layer_bytes(node), tactics=tactics)
        calls = launch(node.attrs, types, node.types, env)
        if len(calls) != 1 or not isinstance(calls[0], CudaCall):
            raise ValueError(f"it takes {len(calls)} launches, and a plug-in has one")
        values = {Pointer("in", i): kind for i, kind in enumerate(types)}
        values |= {Pointer("out", i): kind for i, kind in enumerate(node.types)}
        strides = {RowStride(p.side, p.index): _width(kind) for p, kind in values.items()}
        kernel = plugin_kernel(calls[0], strides, _WRITES[node.op])
        compiled = variant(kernel.call, self._env.sm, {p: kind.dtype for p, kind in values.items()}, strides)
        pool = pool_name(node)
        named = {f"in{i}": e.values[name] for i, name in enumerate(node.inputs)}
        named |= {name: e.values[name] for name in kernel.inputs if name in e.values}
        named[POOL] = e.values.get(f"{pool}.out", e.values[pool])
        plugin = self._plugins.register(node.op, kernel, compiled, [kind.shape for kind in node.types])
        results = e.plugin(plugin, [named[name] for name in kernel.inputs], len(kernel.outputs))
        if WRITTEN in kernel.outputs:
            e.values[f"{pool}.out"] = e.outputs[f"{pool}.out"] = results[kernel.outputs.index(WRITTEN)]
        return results[: len(node.outputs)]

    def _layer_bytes(self, node: Node) -> int:
        a = node.attrs
        return layer_bytes(a.kv_heads, a.head_dim, a.value_dim, self._profile.block_size, self._kv_dtype)


def pool_name(node: Node) -> str:
    """The input that has the blocks of the node's layer."""
    return f"{POOL_PREFIX}{node.attrs.layer}"


def _width(kind: TensorType) -> int:
    """Elements of a row."""
    return prod(int(d) for d in kind.shape[1:])
