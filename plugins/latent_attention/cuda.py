"""How the cuda targets call latent_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.blocks import value_bytes
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Pool, Product, StepArray, Symbol
from llmc.plugins.cuda.partitions import combine, partitions
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.latent_attention import Attrs

_LEAST_WIDTH = 16
#: Warps, at most, for latents of up to so many numbers: more would have nothing to do.
_SMALL, _SMALL_WARPS = 128, 4


def layer_bytes(latent: int, rope: int, block_size: int, kv_dtype: str) -> int:
    """One layer's share of a block: rows [block_size][latent + rope], whatever the number of heads. Raises
    ValueError for FP8: the kernels have no scales for rows that are keys and values at once.
    """
    if kv_dtype == "f8e4m3":
        raise ValueError("the cache of latent attention is bf16, not fp8; build with --kv-cache-dtype bf16")
    return (latent + rope) * value_bytes(block_size, kv_dtype)


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """As for paged_attention: parts of every context and their sum, or tiles of queries. The sums of a tile's rows, as
    wide as a latent, lie in registers.
    """
    a = attrs
    layer_bytes(a.latent, a.rope, env.block_size, env.kv_dtype)
    return _decode(a, env) if env.decode else (_mixed(a, env),)


def _decode(a: Attrs, env: CudaEnv) -> tuple[CudaCall, ...]:
    tactics = env.tactics["decode"]
    parts = partitions(env, tactics)
    between = parts.between(a.heads, a.latent)
    args, constexprs = _common(a, env, tactics)
    first = CudaCall(
        kernel="latent_attention.kernels:decode",
        args=args | {name: arg for name, arg in between.items() if arg is not None},
        constexprs={
            **{name: None for name, arg in between.items() if arg is None},
            **constexprs,
            **parts.constexprs(a.heads),
        },
        grid=((Product(("num_seqs",)),), (Product((a.heads,), tactics["rows"]),), parts.axis()),
        num_warps=_warps(a, tactics),
        num_stages=tactics["stages"],
        narrow=frozenset({0, 1}),
    )
    if parts.count == 1:
        return (first,)
    return first, combine(parts, a.heads, a.latent, {name: args[name] for name in ("y", "y_stride")})


def _mixed(a: Attrs, env: CudaEnv) -> CudaCall:
    tactics = env.tactics["mixed"]
    args, constexprs = _common(a, env, tactics)
    together = min(tactics["rows"], power_of_two(a.heads))
    tokens = tactics["rows"] // together
    return CudaCall(
        kernel="latent_attention.kernels:mixed",
        args=args | {"query_start": StepArray("query_start"), "num_seqs": Symbol("num_seqs")},
        constexprs={**constexprs, "HEADS": a.heads, "TOKENS": tokens},
        grid=((Product(("T",), tokens), Product(("num_seqs",))), (Product((a.heads,), together),)),
        num_warps=_warps(a, tactics),
        num_stages=tactics["stages"],
        narrow=frozenset({0, 1}),
    )


def _block(a: Attrs) -> int:
    return max(_LEAST_WIDTH, power_of_two(a.latent))


def _warps(a: Attrs, tactics: Mapping[str, int]) -> int:
    return tactics["warps"] if _block(a) > _SMALL else min(tactics["warps"], _SMALL_WARPS)


def _common(
    a: Attrs, env: CudaEnv, tactics: Mapping[str, int]
) -> tuple[dict[str, Arg], dict[str, int | float | bool | str | None]]:
    """What both kernels take."""
    args: dict[str, Arg] = {
        "q": Pointer("in", 0),
        "q_rope": Pointer("in", 1),
        "cache": Pool(a.layer, 0, env.kv_dtype),
        "context_len": StepArray("context_len"),
        "block_tables": StepArray("block_tables"),
        "y": Pointer("out", 0),
        "q_stride": RowStride("in", 0),
        "rope_stride": RowStride("in", 1),
        "y_stride": RowStride("out", 0),
        "table_stride": Symbol("table_stride"),
        "scale": float(a.scale),
    }
    constexprs: dict[str, int | float | bool | str | None] = {
        "ROWS": tactics["rows"],
        "KEYS": tactics["keys"],
        "LATENT": a.latent,
        "LATENT_BLOCK": _block(a),
        "ROPE": a.rope,
        "ROPE_BLOCK": max(_LEAST_WIDTH, power_of_two(a.rope)),
        "BLOCK_SIZE": env.block_size,
        "BLOCK_STRIDE": env.kv_block_bytes // NUMPY_DTYPES[env.kv_dtype].itemsize,
    }
    return args, constexprs
