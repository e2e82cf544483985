"""What a block of the KV pool and a slot of recurrent states hold on a GPU, layer by layer.

Comes in: a fused graph. Goes out: tables for the manifest. Must not know: kernels, memory.

Of an attention layer a block holds K as [kv_heads][block_size][head_dim], then V as [kv_heads][block_size][v_dim]; of a
latent one [block_size][latent + rope]; of a recurrence a slot holds the state as it is, f32.
"""

from __future__ import annotations

from math import prod

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.schema import KVLayer
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.arena import ALIGN
from llmc.builder.ir import Graph
from llmc.profiles import CudaTarget, TensorRtTarget


def kv_table(
    graph: Graph, block_size: int, kv_dtype: str, target: CudaTarget | TensorRtTarget, align: int = ALIGN
) -> tuple[tuple[KVLayer, ...], int]:
    """Each attention layer's part of a block, which starts on a multiple of `align`, in the order of layers, and the
    bytes of a block. Raises UnsupportedError for a dtype that the target's cache does not have.
    """
    attention = {n.attrs.layer: n for n in graph if n.op in ("paged_attention", "latent_attention")}
    known = ("bf16", "f8e4m3") if target.fp8 else ("bf16",)
    if attention and kv_dtype not in known:
        raise UnsupportedError(
            f"{target}: keys and values cannot be {kv_dtype}; choose --kv-cache-dtype "
            f"{'bf16 or fp8' if target.fp8 else 'bf16'}"
        )
    layers, offset = [], 0
    for layer, node in sorted(attention.items()):
        a = node.attrs
        if node.op == "latent_attention":
            nbytes = (a.latent + a.rope) * block_size * NUMPY_DTYPES[kv_dtype].itemsize
            layers.append(KVLayer(layer, 1, a.latent + a.rope, kv_dtype, offset, nbytes, latent=a.latent))
        else:
            nbytes = a.kv_heads * (a.head_dim + a.value_dim) * block_size * NUMPY_DTYPES[kv_dtype].itemsize
            layers.append(KVLayer(layer, a.kv_heads, a.head_dim, kv_dtype, offset, nbytes, a.window))
        offset += -(-nbytes // align) * align
    return tuple(layers), offset


def state_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a state f32[shape] of one sequence: it lies as it is."""
    return prod(shape) * NUMPY_DTYPES["f32"].itemsize
