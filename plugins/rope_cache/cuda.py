"""How the cuda targets call rope_cache. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.blocks import check_scaled, places, scaled
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, StepArray, Symbol, Temporary
from llmc.plugins.cuda.rows import block_of, power_of_two, warps_of
from llmc.plugins.rope_cache import Attrs

#: Numbers of q that a program turns, so that a program is worth starting.
_NUMBERS = 512

_MEANS = Temporary("means", "f32", (Product(("T", 2)),))


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A norm over all heads takes a launch of its own for the mean squares, where they are no input.

    Raises ValueError for a block size or cache dtype that the kernels have not.
    """
    check_scaled(attrs.kv_scales, env.kv_dtype)
    turn = scaled(_turn(attrs, inputs, env), attrs.kv_scales, f"tl.minimum(tl.program_id(1), {attrs.kv_heads - 1})")
    over_all = attrs.has_norm and attrs.norm_scope == "all" and not attrs.norm_means
    return (_means(attrs), turn) if over_all else (turn,)


def _means(a: Attrs) -> CudaCall:
    widths = {"Q": a.heads * a.head_dim, "K": a.kv_heads * a.head_dim}
    blocks = {name: block_of(width) for name, width in widths.items()}
    return CudaCall(
        kernel="rope_cache.kernels:head_means",
        args={
            "q": Pointer("in", 0),
            "k": Pointer("in", 1),
            "means": _MEANS,
            "q_stride": RowStride("in", 0),
            "k_stride": RowStride("in", 1),
        },
        constexprs={f"{name}_WIDTH": width for name, width in widths.items()}
        | {f"{name}_BLOCK": block for name, block in blocks.items()},
        grid=((Product(("T",)),), (Product((2,)),)),
        num_warps=warps_of(max(blocks.values())),
    )


def _turn(a: Attrs, inputs: Sequence[TensorType], env: CudaEnv) -> CudaCall:
    keys, values, block_stride = places(a.layer, a.kv_heads, a.head_dim, env)
    args: dict[str, Arg] = {
        "y": Pointer("out", 0),
        "y_stride": RowStride("out", 0),
        "keys": keys,
        "values": values,
        "positions": StepArray("positions"),
        "sequences": StepArray("sequence"),
        "block_tables": StepArray("block_tables"),
        "table_stride": Symbol("table_stride"),
        "cos_stride": 0,
        "sin_stride": 0,
        "means_stride": RowStride("in", len(inputs) - 1) if a.norm_means else 2,
    }
    rows = ["q", "k", "v", *(["cos", "sin"] if a.rotary else [])]
    args |= {f"{name}_stride": RowStride("in", i) for i, name in enumerate(rows)}
    weights = ["q_weight", "k_weight"] * a.has_norm + ["q_bias", "k_bias"] * (a.has_norm and a.norm_bias)
    given = [*rows, *weights, *(["means"] if a.norm_means else [])]
    args |= {name: Pointer("in", i) for i, name in enumerate(given)}
    if a.has_norm and a.qk_norm_eps is not None:
        args["eps"] = float(a.qk_norm_eps)
        if a.norm_scope == "all" and not a.norm_means:
            args["means"] = _MEANS
    optional = ("cos", "sin", "q_weight", "k_weight", "q_bias", "k_bias", "means", "eps")
    block = power_of_two(a.head_dim)
    together = min(power_of_two(a.heads), max(1, _NUMBERS // block))
    return CudaCall(
        kernel="rope_cache.kernels:rope_cache",
        args=args,
        constexprs={
            **{name: None for name in optional if name not in args},
            "HEADS": a.heads,
            "KV_HEADS": a.kv_heads,
            "TOGETHER": together,
            "WIDTH": a.head_dim,
            "BLOCK": block,
            "V_WIDTH": a.value_dim,
            "V_BLOCK": power_of_two(a.value_dim),
            "ROTARY": a.rotary,
            "INTERLEAVED": a.style == "interleaved",
            "LAYER_NORM": a.norm == "layer",
            "NORM_LAST": a.norm_last,
            "OWN_WEIGHTS": a.norm_scope != "head",
            "BLOCK_SIZE": env.block_size,
            "BLOCK_STRIDE": block_stride,
        },
        grid=((Product(("T",)),), (Product((a.kv_heads,)), Product((a.heads,), together))),
        num_warps=1 if together * block <= _NUMBERS else warps_of(block),
    )
