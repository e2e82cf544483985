"""What a build is asked for. Comes in: nothing. Goes out: `BuildOptions`. Imports nothing: asking must be cheap."""

from __future__ import annotations

from dataclasses import dataclass

#: What users call the dtypes of the cache -> `BuildOptions.kv_dtype`.
KV_CACHE_DTYPES = {
    "auto": None,
    "fp32": "f32",
    "f32": "f32",
    "bf16": "bf16",
    "fp8": "f8e4m3",
    "fp8_e4m3": "f8e4m3",
}


@dataclass(frozen=True)
class BuildOptions:
    """What is built: `precision` fp32|bf16|fp8|int8|int4, `lm_head_dtype` bf16|fp8 of the output head in an engine
    of rounded weights; `kv_dtype` f32|bf16|f8e4m3 (None: f32 for fp32, else bf16);
    `profile` and `target` by name, `tactics` a file of them (llmc.profiles.tactics) or None. How: `verify_passes` by
    the interpreter, `cxx` the compiler, `workers` translation units at once, `cache` of traces and object files. The
    plan's bytes depend on the first group and on the compiler's version.
    """

    precision: str = "bf16"
    tp: int = 1
    profile: str = "chat"
    target: str = "cpu"
    kv_dtype: str | None = None
    fp8_activations: str = "token"
    lm_head_dtype: str = "bf16"
    tactics: str | None = None
    verify_passes: bool = False
    cxx: str = "g++"
    workers: int | None = None
    cache: bool = True
