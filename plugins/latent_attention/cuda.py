"""How the cuda targets call latent_attention, and where the cache's bytes lie. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.blocks import value_bytes
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Pool, Product, StepArray, Symbol
from llmc.plugins.cuda.partitions import combine, partitions
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.latent_attention import Attrs

#: Rows of a tile: their sums, as wide as a latent, lie in registers.
_ROWS = 32
_LEAST_WIDTH = 16
#: Architectures with the shared memory for a tile of 32 wide latents, twice (CUDA C++ Programming Guide).
_LARGE_SHARED = (80, 90, 100)


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
    """As for paged_attention: parts of every context and their sum, or tiles of queries."""
    a = attrs
    layer_bytes(a.latent, a.rope, env.block_size, env.kv_dtype)
    return _decode(a, env) if env.decode else (_mixed(a, env),)


def _decode(a: Attrs, env: CudaEnv) -> tuple[CudaCall, ...]:
    parts = partitions(env, env.tactics.get("decode", {}))
    between = parts.between(a.heads, a.latent)
    args, constexprs, warps = _common(a, env)
    first = CudaCall(
        kernel="latent_attention.kernels:decode",
        args=args | {name: arg for name, arg in between.items() if arg is not None},
        constexprs={
            **{name: None for name, arg in between.items() if arg is None},
            **constexprs,
            **parts.constexprs(a.heads),
        },
        grid=((Product(("num_seqs",)),), (Product((a.heads,), _ROWS),), parts.axis()),
        num_warps=warps,
        narrow=frozenset({0, 1}),
    )
    if parts.count == 1:
        return (first,)
    return first, combine(parts, a.heads, a.latent, {name: args[name] for name in ("y", "y_stride")})


def _mixed(a: Attrs, env: CudaEnv) -> CudaCall:
    args, constexprs, warps = _common(a, env)
    together = min(_ROWS, power_of_two(a.heads))
    tokens = _ROWS // together
    return CudaCall(
        kernel="latent_attention.kernels:mixed",
        args=args | {"query_start": StepArray("query_start"), "num_seqs": Symbol("num_seqs")},
        constexprs={**constexprs, "HEADS": a.heads, "TOKENS": tokens},
        grid=((Product(("T",), tokens), Product(("num_seqs",))), (Product((a.heads,), together),)),
        num_warps=warps,
        narrow=frozenset({0, 1}),
    )


def _common(a: Attrs, env: CudaEnv) -> tuple[dict[str, Arg], dict[str, int | float | bool | str | None], int]:
    """What both kernels take, and their warps."""
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
    block = max(_LEAST_WIDTH, power_of_two(a.latent))
    keys = 32 if block <= 256 or env.sm in _LARGE_SHARED else 16
    constexprs: dict[str, int | float | bool | str | None] = {
        "ROWS": _ROWS,
        "KEYS": keys,
        "LATENT": a.latent,
        "LATENT_BLOCK": block,
        "ROPE": a.rope,
        "ROPE_BLOCK": max(_LEAST_WIDTH, power_of_two(a.rope)),
        "BLOCK_SIZE": env.block_size,
        "BLOCK_STRIDE": env.kv_block_bytes // NUMPY_DTYPES[env.kv_dtype].itemsize,
    }
    return args, constexprs, 8 if block > 128 else 4
