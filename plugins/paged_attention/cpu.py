"""How the cpu target calls paged_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.blocks import KV_TYPES, head_scales, partial_floats, value_bytes
from llmc.plugins.cpu.call import Call, CpuCall, KernelEnv, Literal, Pointer, Scratch
from llmc.plugins.paged_attention import Attrs

#: The most rows of a tile of queries (cpu.h), in vectors and in AMX's tiles.
_TILE_ROWS, _AMX_ROWS = 24, 64


def in_tiles(head_dim: int, v_dim: int, kv_dtype: str, tiles: bool) -> bool:
    """Whether the cache lies in AMX's tiles, `BlockLayout::kTiled` of layout.h."""
    return tiles and kv_dtype in ("bf16", "f8e4m3") and head_dim % 32 == 0 and v_dim % 32 == 0


def layer_bytes(kv_heads: int, head_dim: int, v_dim: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: K, then V, in either layout of layout.h."""
    return kv_heads * (head_dim + v_dim) * value_bytes(block_size, kv_dtype)


def scratch_bytes(attrs: Attrs, kv_dtype: str, max_context: int, tiles: bool = False) -> int:
    """`PagedAttention::scratch_bytes` of cpu.h, for each thread (a test compares them)."""
    group = attrs.heads // attrs.kv_heads
    most = _AMX_ROWS if in_tiles(attrs.head_dim, attrs.value_dim, kv_dtype, tiles) else _TILE_ROWS
    return 4 * partial_floats(max(1, most // group) * group, attrs.value_dim, max_context)


def scoring(attrs: Attrs) -> str:
    """The kernel's `Scoring`."""
    flags = (attrs.softcap is not None, attrs.slopes, attrs.sinks)
    return f"llmc::Scoring<{attrs.window or 0}, {attrs.chunk or 0}, {', '.join(str(f).lower() for f in flags)}>"


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Needs `env.kv_offsets[layer]`, `env.max_context`; raises ValueError for a block size the kernel has not."""
    value_bytes(env.block_size, env.kv_dtype)
    widths = f"{attrs.heads}, {attrs.kv_heads}, {attrs.head_dim}, {attrs.value_dim}"
    given = [attrs.slopes, attrs.sinks]
    by_head = [Pointer("in", 1 + sum(given[:i])) if has else Literal("nullptr") for i, has in enumerate(given)]
    numbers = (attrs.scale, attrs.softcap or 0.0)
    values = (
        Pointer("in", 0),
        *by_head,
        *(Literal(f"{float(number)!r}f") for number in numbers),
        *env.kv_place(attrs.layer),
    )
    scales = head_scales(attrs.kv_scales, env.kv_dtype)
    cache = f"{env.block_size}, {KV_TYPES[env.kv_dtype]}"
    scratch = scratch_bytes(attrs, env.kv_dtype, env.max_context, env.tiles)
    return CpuCall(
        header="plugins/paged_attention/cpu.h",
        function=f"paged_attention<{widths}, {cache}, {scoring(attrs)}, {scales.type}>",
        args=(Call("llmc::PagedInputs", values), Pointer("out", 0), scales),
        scratch=Scratch(per_thread=scratch),
    )
