"""How the cuda targets call latent_cache. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.blocks import value_bytes
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Pool, Product, StepArray, Symbol
from llmc.plugins.cuda.rows import block_of, power_of_two, warps_of
from llmc.plugins.latent_cache import Attrs

#: Numbers of q that a program turns, so that a program is worth starting.
_NUMBERS = 512


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """Raises ValueError for a block size or cache dtype that the kernel has not."""
    a = attrs
    value_bytes(env.block_size, env.kv_dtype)
    args: dict[str, Arg] = {
        "y": Pointer("out", 0),
        "y_stride": RowStride("out", 0),
        "cache": Pool(a.layer, 0, env.kv_dtype),
        "positions": StepArray("positions"),
        "sequences": StepArray("sequence"),
        "block_tables": StepArray("block_tables"),
        "table_stride": Symbol("table_stride"),
        "cos_stride": 0,
        "sin_stride": 0,
    }
    rows = ["q", "latent", "key", *(["cos", "sin"] if a.style is not None else [])]
    args |= {name: Pointer("in", i) for i, name in enumerate(rows)}
    args |= {f"{name}_stride": RowStride("in", i) for i, name in enumerate(rows)}
    if a.norm_eps is not None:
        args |= {"weight": Pointer("in", len(rows)), "eps": float(a.norm_eps)}
    rope, latent = power_of_two(a.rope), block_of(a.latent)
    together = min(power_of_two(a.heads), max(1, _NUMBERS // rope))
    call = CudaCall(
        kernel="latent_cache.kernels:latent_cache",
        args=args,
        constexprs={
            **{name: None for name in ("cos", "sin", "weight", "eps") if name not in args},
            "HEADS": a.heads,
            "TOGETHER": together,
            "Q_WIDTH": int(inputs[0].shape[1]) // a.heads,
            "Q_FIRST": a.q_start,
            "LATENT": a.latent,
            "LATENT_BLOCK": latent,
            "ROPE": a.rope,
            "ROPE_BLOCK": rope,
            "INTERLEAVED": a.style == "interleaved",
            "BLOCK_SIZE": env.block_size,
            "BLOCK_STRIDE": env.kv_block_bytes // NUMPY_DTYPES[env.kv_dtype].itemsize,
        },
        grid=((Product(("T",)),), (Product((1,)), Product((a.heads,), together))),
        num_warps=warps_of(latent),
    )
    return (call,)
