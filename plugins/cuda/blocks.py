"""Blocks of the paged cache as the kernels of the cuda targets read and write them, and their scales by KV head.

Comes in: block size, cache dtype, widths, scales. Goes out: sizes, pointers and calls, or the reason why not. Must not
know: builder, runtime.

A layer's part of a block is its keys [kv_heads][block_size][head_dim], then its values [kv_heads][block_size][v_dim].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmc.artifacts.types import NUMPY_DTYPES, KVScales
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Pool

BLOCK_SIZES = (16, 32, 64)
KV_DTYPES = ("bf16", "f8e4m3")


def value_bytes(block_size: int, kv_dtype: str) -> int:
    """Bytes of one column of a block, a number a token; raises ValueError for a size or dtype that kernels have not."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}, which the cuda targets have")
    return block_size * NUMPY_DTYPES[kv_dtype].itemsize


def places(layer: int, kv_heads: int, head_dim: int, env: CudaEnv) -> tuple[Pool, Pool, int]:
    """Where a layer's keys and values lie, and the elements from one block to the next."""
    keys = kv_heads * head_dim * value_bytes(env.block_size, env.kv_dtype)
    stride = env.kv_block_bytes // NUMPY_DTYPES[env.kv_dtype].itemsize
    return Pool(layer, 0, env.kv_dtype), Pool(layer, keys, env.kv_dtype), stride


def check_scaled(scales: KVScales | None, kv_dtype: str) -> None:
    """Raises ValueError for FP8 without scales."""
    if scales is None and kv_dtype == "f8e4m3":
        raise ValueError("a cache in f8e4m3 needs the scales of keys and values")


def scaled(call: CudaCall, scales: KVScales | None, head: str) -> CudaCall:
    """The call with the kernel's `key_scale` and `value_scale`, those of the program's KV head; without scales 1.

    `head`: the KV head's number in Triton. Scales that differ by head are arguments of a kernel that is generated
    around the call's own: all layers share its code, whatever their scales.
    """
    kinds = dict(zip(("key_scale", "value_scale"), scales or ((1.0,), (1.0,)), strict=True))
    if all(len(set(given)) == 1 for given in kinds.values()):
        return replace(call, args={**call.args, **{name: float(given[0]) for name, given in kinds.items()}})
    by_head = {f"{name}_{i}": float(scale) for name, given in kinds.items() for i, scale in enumerate(given)}
    source = _chooser(call, kinds, by_head, head)
    return replace(call, kernel=f"scaled:{call.kernel.partition(':')[2]}", args={**call.args, **by_head}, source=source)


def _chooser(call: CudaCall, kinds: Mapping[str, object], by_head: Mapping[str, float], head: str) -> str:
    module, _, name = call.kernel.partition(":")
    constants = [f"{constant}: tl.constexpr" for constant in call.constexprs]
    chosen = []
    for scale in by_head:
        kind, _, number = scale.rpartition("_")
        chosen.append(f"{kind} = {scale}" if number == "0" else f"{kind} = tl.where(head == {number}, {scale}, {kind})")
    passed = [f"{arg}={arg}" for arg in (*call.args, *call.constexprs, *kinds)]
    return "\n".join(
        [
            "import triton",
            "import triton.language as tl",
            "",
            f"from llmc.plugins.{module} import {name} as body",
            "",
            "",
            "@triton.jit",
            f"def {name}({', '.join([*call.args, *by_head, *constants])}):",
            f"    head = {head}",
            *(f"    {line}" for line in chosen),
            f"    body({', '.join(passed)})",
            "",
        ]
    )
