"""Blocks of the paged cache as the kernels of the cpu target can read them.

Comes in: a block size and a cache dtype. Goes out: `value_bytes`, or the reason why not. Must not know: builder,
runtime, what a block holds.
"""

from __future__ import annotations

from llmc.artifacts.types import NUMPY_DTYPES, KVScales
from llmc.plugins.cpu.call import Call, Literal

#: What kernels are written for: multiples of their 16 lanes that divide their partitions of `PARTITION` positions.
BLOCK_SIZES = (16, 32, 64, 128, 256)
#: dtype of the cache -> its C++ type.
KV_TYPES = {"f32": "float", "bf16": "llmc::bf16", "f8e4m3": "llmc::fp8"}
#: As in partitions.h.
PARTITION, LANES = 256, 16


def value_bytes(block_size: int, kv_dtype: str) -> int:
    """Bytes of one column of a block, a number a token; raises ValueError for a size or dtype that kernels have not."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if kv_dtype not in KV_TYPES:
        raise ValueError(f"kv dtype {kv_dtype!r} is not one of {', '.join(KV_TYPES)}")
    return block_size * NUMPY_DTYPES[kv_dtype].itemsize


def partial_floats(rows: int, values: int, max_context: int) -> int:
    """Floats that a thread leaves for others: `rows` of `Partial<values>` (partitions.h) for each partition."""
    return rows * (-(-values // LANES) * LANES + LANES) * -(-max_context // PARTITION)


def head_scales(scales: KVScales | None, kv_dtype: str) -> Call:
    """The kernel's `HeadScales`, or `Unscaled` for None. Raises ValueError for FP8 without scales."""
    if scales is None:
        if kv_dtype == "f8e4m3":
            raise ValueError("a cache in f8e4m3 needs the scales of keys and values")
        return Call("llmc::Unscaled", ())
    return Call(
        f"llmc::HeadScales<{len(scales[0])}>", tuple(Literal(f"{float(s)!r}f") for s in (*scales[0], *scales[1]))
    )
