"""How the cuda targets call paged_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.blocks import check_scaled, places, scaled, value_bytes
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, StepArray, Symbol, Temporary
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.paged_attention import Attrs

#: A decode step divides a context into parts of at least so many positions, and into at most so many parts.
_LEAST_PARTITION, _MOST_PARTITIONS = 256, 32
#: Architectures whose tensor cores leave their sums, or read operands, outside a warp's registers.
_WARP_GROUPS = (90, 100)
#: The least operand of a product on tensor cores.
_LEAST_ROWS = 16

Constexprs = dict[str, int | float | bool | str | None]


def layer_bytes(kv_heads: int, head_dim: int, v_dim: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: K [kv_heads][block_size][head_dim], then V [kv_heads][block_size][v_dim]."""
    return kv_heads * (head_dim + v_dim) * value_bytes(block_size, kv_dtype)


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """For decode the parts of every context at once and then their sum, else tiles of queries. Tactics "decode":
    `partition`, `keys`, `num_warps`, `num_stages`; "mixed": `rows`, `keys`, `num_warps`, `num_stages`.

    Raises ValueError for a block size or cache dtype that the kernels have not.
    """
    check_scaled(attrs.kv_scales, env.kv_dtype)
    return _decode(attrs, env) if env.decode else (_mixed(attrs, env),)


def _decode(a: Attrs, env: CudaEnv) -> tuple[CudaCall, ...]:
    tactics = env.tactics.get("decode", {})
    partition = tactics.get("partition") or max(_LEAST_PARTITION, power_of_two(-(-env.max_context // _MOST_PARTITIONS)))
    parts, visible = -(-env.max_context // partition), _visible(a)
    if visible is not None:
        parts = min(parts, -(-(visible - 1) // partition) + 1)
    splits: Constexprs = {"HEADS": a.heads, "PARTITION": partition, "PARTITIONS": parts}
    shape: tuple[int | str, ...] = ("num_seqs", a.heads, parts)
    between: dict[str, Arg] = {
        "partial": Temporary("partial", "f32", (Product((*shape, a.value_dim)),)),
        "partial_most": Temporary("partial_most", "f32", (Product(shape),)),
        "partial_total": Temporary("partial_total", "f32", (Product(shape),)),
    }
    args, constexprs = _common(a, env)
    rows = max(_LEAST_ROWS, power_of_two(a.heads // a.kv_heads))
    used = between if parts > 1 else {}
    first = CudaCall(
        kernel="paged_attention.kernels:decode",
        args=args | used,
        constexprs=dict.fromkeys(between if parts == 1 else ()) | constexprs | splits | _tile(a, rows, tactics),
        grid=(
            (Product(("num_seqs",)),),
            (Product((a.kv_heads,)),),
            (Product(("max_context",), partition) if visible is None else Product((parts,)),),
        ),
        num_warps=tactics.get("num_warps", 4),
        num_stages=tactics.get("num_stages", 2),
        narrow=frozenset({0}),
    )
    calls = [scaled(first, a.kv_scales, "tl.program_id(1)")]
    if parts > 1:
        calls.append(_combine(a, args, constexprs, between, splits))
    return tuple(calls)


def _combine(
    a: Attrs, args: Mapping[str, Arg], constexprs: Constexprs, between: Mapping[str, Arg], splits: Constexprs
) -> CudaCall:
    own = {name: args[name] for name in ("sinks", "context_len", "y", "y_stride") if name in args}
    fixed: Constexprs = {"sinks": None} if "sinks" in constexprs else {}
    fixed |= {name: constexprs[name] for name in ("V_WIDTH", "WINDOW", "CHUNK")}
    block = power_of_two(a.value_dim)
    return CudaCall(
        kernel="paged_attention.kernels:combine",
        args={**between, **own},
        constexprs={**fixed, **splits, "V_BLOCK": block},
        grid=((Product(("num_seqs",)),), (Product((a.heads,)),)),
        num_warps=max(1, block // 128),
    )


def _mixed(a: Attrs, env: CudaEnv) -> CudaCall:
    tactics = env.tactics.get("mixed", {})
    group = a.heads // a.kv_heads
    widest = max(a.head_dim, a.value_dim)
    rows = max(tactics.get("rows") or (64 if widest <= 128 else 32 if widest <= 256 else 16), power_of_two(group))
    args, constexprs = _common(a, env)
    args |= {"query_start": StepArray("query_start"), "num_seqs": Symbol("num_seqs")}
    tokens = rows // group
    keys = 32 if widest > 64 and env.sm not in _WARP_GROUPS else 64  # scores beside sums: 64 would spill
    call = CudaCall(
        kernel="paged_attention.kernels:mixed",
        args=args,
        constexprs=constexprs | _tile(a, rows, {"keys": keys, **tactics}) | {"TOKENS": tokens},
        grid=((Product(("T",), tokens), Product(("num_seqs",))), (Product((a.kv_heads,)),)),
        num_warps=tactics.get("num_warps", 4),
        num_stages=tactics.get("num_stages", 2),
        narrow=frozenset({0}),
    )
    return scaled(call, a.kv_scales, "tl.program_id(1)")


def _visible(a: Attrs) -> int | None:
    """How many keys a query sees at most; None: all before it."""
    limits = [limit for limit in (a.window, a.chunk) if limit is not None]
    return min(limits, default=None)


def _common(a: Attrs, env: CudaEnv) -> tuple[dict[str, Arg], Constexprs]:
    """What both kernels take."""
    keys, values, stride = places(a.layer, a.kv_heads, a.head_dim, env)
    args: dict[str, Arg] = {
        "q": Pointer("in", 0),
        "keys": keys,
        "values": values,
        "context_len": StepArray("context_len"),
        "block_tables": StepArray("block_tables"),
        "y": Pointer("out", 0),
        "q_stride": RowStride("in", 0),
        "y_stride": RowStride("out", 0),
        "table_stride": Symbol("table_stride"),
        "scale": float(a.scale),
    }
    optional: dict[str, Arg | None] = {
        "slopes": Pointer("in", 1) if a.slopes else None,
        "sinks": Pointer("in", 1 + a.slopes) if a.sinks else None,
        "softcap": None if a.softcap is None else float(a.softcap),
    }
    args |= {name: arg for name, arg in optional.items() if arg is not None}
    constexprs: Constexprs = {name: None for name, arg in optional.items() if arg is None}
    constexprs |= {
        "GROUP": a.heads // a.kv_heads,
        "WIDTH": a.head_dim,
        "V_WIDTH": a.value_dim,
        "BLOCK_SIZE": env.block_size,
        "BLOCK_STRIDE": stride,
        "WINDOW": a.window,
        "CHUNK": a.chunk,
    }
    return args, constexprs


def _tile(a: Attrs, rows: int, tactics: Mapping[str, int]) -> Constexprs:
    """The blocks of a tile; what keys and values take of shared memory grows with their widths."""
    widest = max(a.head_dim, a.value_dim)
    return {
        "ROWS": rows,
        "KEYS": min(tactics.get("keys", 64), 64 if widest <= 128 else 32 if widest <= 256 else 16),
        "WIDTH_BLOCK": max(_LEAST_ROWS, power_of_two(a.head_dim)),
        "V_BLOCK": max(_LEAST_ROWS, power_of_two(a.value_dim)),
    }
