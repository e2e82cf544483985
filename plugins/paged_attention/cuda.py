"""How the cuda targets call paged_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.blocks import check_scaled, places, scaled, value_bytes
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, StepArray, Symbol
from llmc.plugins.cuda.partitions import combine, partitions
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.paged_attention import Attrs

#: The least operand of a product on tensor cores.
_LEAST_ROWS = 16
#: Heads wider than this are cut by tactics of their own, `mixed_wide`.
_WIDE = 64

Constexprs = dict[str, int | float | bool | str | None]


def layer_bytes(kv_heads: int, head_dim: int, v_dim: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: K [kv_heads][block_size][head_dim], then V [kv_heads][block_size][v_dim]."""
    return kv_heads * (head_dim + v_dim) * value_bytes(block_size, kv_dtype)


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """For decode the parts of every context at once and then their sum, else tiles of queries. Tactics: see partitions.

    Raises ValueError for a block size or cache dtype that the kernels have not.
    """
    check_scaled(attrs.kv_scales, env.kv_dtype)
    return _decode(attrs, env) if env.decode else (_mixed(attrs, env),)


def _decode(a: Attrs, env: CudaEnv) -> tuple[CudaCall, ...]:
    tactics = env.tactics["decode"]
    parts = partitions(env, tactics, min((n for n in (a.window, a.chunk) if n is not None), default=None))
    between = parts.between(a.heads, a.value_dim)
    args, constexprs = _common(a, env)
    rows = max(_LEAST_ROWS, power_of_two(a.heads // a.kv_heads))
    first = CudaCall(
        kernel="paged_attention.kernels:decode",
        args=args | {name: arg for name, arg in between.items() if arg is not None},
        constexprs={
            **{name: None for name, arg in between.items() if arg is None},
            **constexprs,
            **parts.constexprs(a.heads),
            **_tile(a, rows, tactics),
        },
        grid=((Product(("num_seqs",)),), (Product((a.kv_heads,)),), parts.axis()),
        num_warps=tactics["warps"],
        num_stages=tactics["stages"],
        narrow=frozenset({0}),
    )
    calls = [scaled(first, a.kv_scales, "tl.program_id(1)")]
    if parts.count > 1:
        y = {name: args[name] for name in ("y", "y_stride")}
        calls.append(combine(parts, a.heads, a.value_dim, y, args.get("sinks"), a.window, a.chunk))
    return tuple(calls)


def _mixed(a: Attrs, env: CudaEnv) -> CudaCall:
    group = a.heads // a.kv_heads
    widest = max(a.head_dim, a.value_dim)
    tactics = env.tactics["mixed_wide" if widest > _WIDE else "mixed"]
    rows = max(min(tactics["rows"], _most(widest)), power_of_two(group))
    args, constexprs = _common(a, env)
    args |= {"query_start": StepArray("query_start"), "num_seqs": Symbol("num_seqs")}
    tokens = rows // group
    call = CudaCall(
        kernel="paged_attention.kernels:mixed",
        args=args,
        constexprs=constexprs | _tile(a, rows, tactics) | {"TOKENS": tokens},
        grid=((Product(("T",), tokens), Product(("num_seqs",))), (Product((a.kv_heads,)),)),
        num_warps=tactics["warps"],
        num_stages=tactics["stages"],
        narrow=frozenset({0}),
    )
    return scaled(call, a.kv_scales, "tl.program_id(1)")


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


def _most(widest: int) -> int:
    """Queries or keys of a tile, at most: what they take of registers and shared memory grows with their widths."""
    return 128 if widest <= 128 else 32 if widest <= 256 else 16


def _tile(a: Attrs, rows: int, tactics: Mapping[str, int]) -> Constexprs:
    """The blocks of a tile."""
    return {
        "ROWS": rows,
        "KEYS": min(tactics["keys"], _most(max(a.head_dim, a.value_dim))),
        "WIDTH_BLOCK": max(_LEAST_ROWS, power_of_two(a.head_dim)),
        "V_BLOCK": max(_LEAST_ROWS, power_of_two(a.value_dim)),
    }
