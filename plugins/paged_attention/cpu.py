"""How the cpu target calls paged_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import C_TYPES, Call, CpuCall, KernelEnv, Literal, Pointer, Scratch
from llmc.plugins.paged_attention import Attrs

#: What the kernel is written for: multiples of its 16 lanes that divide its partitions of 256 positions.
BLOCK_SIZES = (16, 32, 64, 128, 256)
KV_DTYPES = ("f32", "bf16")
_PARTITION, _TILE_ROWS, _LANES = 256, 24, 16


def layer_bytes(kv_heads: int, head_dim: int, v_dim: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: K [kv_heads][head_dim][block_size], then V [kv_heads][block_size][v_dim]."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    return kv_heads * (head_dim + v_dim) * block_size * NUMPY_DTYPES[kv_dtype].itemsize


def scratch_bytes(heads: int, kv_heads: int, v_dim: int, max_context: int) -> int:
    """`PagedAttention::scratch_bytes` of cpu.h, for each thread (a test compares them)."""
    group = heads // kv_heads
    rows = max(1, _TILE_ROWS // group) * group
    stride = -(-v_dim // _LANES) * _LANES + _LANES
    return 4 * rows * stride * -(-max_context // _PARTITION)


def scoring(attrs: Attrs) -> str:
    """The kernel's `Scoring`."""
    flags = (attrs.softcap is not None, attrs.slopes, attrs.sinks)
    return f"llmc::Scoring<{attrs.window or 0}, {attrs.chunk or 0}, {', '.join(str(f).lower() for f in flags)}>"


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Needs `env.kv_offsets[layer]`, `env.max_context`; raises ValueError for a block size the kernel has not."""
    layer_bytes(attrs.kv_heads, attrs.head_dim, attrs.value_dim, env.block_size, env.kv_dtype)
    widths = f"{attrs.heads}, {attrs.kv_heads}, {attrs.head_dim}, {attrs.value_dim}"
    given = [attrs.slopes, attrs.sinks]
    by_head = [Pointer("in", 1 + sum(given[:i])) if has else Literal("nullptr") for i, has in enumerate(given)]
    numbers = (attrs.scale, attrs.softcap or 0.0)
    place = (env.kv_offsets[attrs.layer], env.kv_block_bytes)
    values = (
        Pointer("in", 0),
        *by_head,
        *(Literal(f"{float(number)!r}f") for number in numbers),
        *(Literal(str(number)) for number in place),
    )
    return CpuCall(
        header="plugins/paged_attention/cpu.h",
        function=f"paged_attention<{widths}, {env.block_size}, {C_TYPES[env.kv_dtype]}, {scoring(attrs)}>",
        args=(Call("llmc::PagedInputs", values), Pointer("out", 0)),
        scratch=Scratch(per_thread=scratch_bytes(attrs.heads, attrs.kv_heads, attrs.value_dim, env.max_context)),
    )
