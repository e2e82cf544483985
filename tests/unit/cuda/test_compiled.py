"""The same launches that the interpreter runs, compiled: nothing spills, attention multiplies on tensor cores, and the
cubin's parameters are the launch's. Compiled, not run on a GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.types import TensorType
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.cuda.compile import CudaCompiler
from llmc.builder.cuda.cubin import Cubin, resources
from llmc.builder.cuda.sass import instructions
from llmc.builder.cuda.variant import variant
from llmc.plugins import OPERATORS
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.paged_attention.cuda import layer_bytes
from tests.unit.cuda.harness import launches
from tests.unit.plugins.test_row_programs import PROGRAMS

#: What products on tensor cores are called: warps', warp groups', and those of sm_100.
TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")
HEADS, KV_HEADS, WIDTH = 32, 8, 128
SCALES = (tuple(0.1 + i for i in range(KV_HEADS)),) * 2
ATTENTION = {"layer": 0, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH}
Q = [f"f32[T,{HEADS},{WIDTH}]"]
QKV = [f"f32[T,{heads * WIDTH}]" for heads in (HEADS, KV_HEADS, KV_HEADS)]


def compiled(name: str, attrs: Any, texts: Sequence[str], sm: int, decode: bool, kv_dtype: str = "bf16",
             narrow: Sequence[tuple[str, int]] = ()) -> list[tuple[CudaCall, Cubin]]:  # fmt: skip
    """The launches of a node and their cubins; `narrow`: values that lie in bf16."""
    operator = OPERATORS[name]
    types = [TensorType.parse(text) for text in texts]
    values = {Pointer("in", i): kind for i, kind in enumerate(types)}
    values |= {Pointer("out", i): kind for i, kind in enumerate(operator.infer(attrs, types))}
    env = CudaEnv(
        sm, (1, 64), decode, kv_dtype=kv_dtype, max_context=8192,
        kv_block_bytes=4 * layer_bytes(KV_HEADS, WIDTH, WIDTH, 16, kv_dtype),
    )  # fmt: skip
    dtypes = {p: "bf16" if (p.side, p.index) in narrow else kind.dtype for p, kind in values.items()}
    strides = {RowStride(p.side, p.index): kind.size(T=1, S=1) for p, kind in values.items()}
    calls = launches(operator, attrs, types, env)
    cache = ObjectCache(Path(tempfile.gettempdir()) / "llmc-cubin-tests", suffix=".cubin")
    return list(
        zip(calls, CudaCompiler(cache, 1).cubins([variant(c, sm, dtypes, strides) for c in calls]), strict=True)
    )


def check(made: Sequence[tuple[CudaCall, Cubin]], sm: int, tensor_cores: bool) -> None:
    for call, cubin in made:
        found = resources(cubin.code)
        assert found.local == 0, f"{call.kernel} for sm_{sm} spills {found.local} bytes a thread"
        assert found.threads == 32 * call.num_warps
        assert set(cubin.parameters) >= set(call.args)
        assert cubin.shared <= (99 << 10), f"{call.kernel} for sm_{sm} takes {cubin.shared} bytes"
    if tensor_cores:
        names = instructions(made[0][1].code)
        assert any(name.startswith(TENSOR_CORES) for name in names), sorted(names)


@pytest.mark.parametrize(
    ("sm", "decode"), [(80, False), (89, False), (90, False), (100, False), (120, False), (80, True), (100, True)]
)
def test_attention(sm: int, decode: bool) -> None:
    attrs = OPERATORS["paged_attention"].attrs(**ATTENTION, scale=0.09)
    made = compiled("paged_attention", attrs, Q, sm, decode, narrow=[("in", 0), ("out", 0)])
    assert len(made) == 1 + decode
    check(made, sm, True)


def test_attention_over_fp8() -> None:
    attrs = OPERATORS["paged_attention"].attrs(**ATTENTION, scale=0.09, kv_scales=SCALES)
    check(compiled("paged_attention", attrs, Q, 89, False, "f8e4m3", [("in", 0)]), 89, True)


def test_rope_cache_with_everything() -> None:
    attrs = OPERATORS["rope_cache"].attrs(
        **ATTENTION, rotary=WIDTH, qk_norm_eps=1e-6, norm_scope="all", kv_scales=SCALES
    )
    texts = [*QKV, f"f32[T,{WIDTH}]", f"f32[T,{WIDTH}]", f"f32[{HEADS * WIDTH}]", f"f32[{KV_HEADS * WIDTH}]"]
    check(compiled("rope_cache", attrs, texts, 90, True, "f8e4m3", [("out", 0)]), 90, False)


def test_latent_attention() -> None:
    cache = OPERATORS["latent_cache"].attrs(0, 4, 256, 64, 128, "interleaved", 1e-6)
    texts = ["f32[T,768]", "f32[T,256]", "f32[T,64]", "f32[T,32]", "f32[T,32]", "f32[256]"]
    check(compiled("latent_cache", cache, texts, 90, True), 90, False)
    attention = OPERATORS["latent_attention"].attrs(0, 4, 256, 64, 0.1)
    narrow = [("in", 0), ("in", 1)]
    check(compiled("latent_attention", attention, ["f32[T,1024]", "f32[T,256]"], 90, True, narrow=narrow), 90, True)


@pytest.mark.parametrize(
    ("name", "attrs", "texts"),
    [
        ("rms_norm", {"eps": 1e-5, "residual": True, "quantize": "token"}, ["f32[T,4096]", "f32[4096]", "f32[T,4096]"]),
        ("layer_norm", {"eps": 1e-5}, ["f32[T,600]", "f32[600]", "f32[600]"]),
        ("pointwise", {"expr": "mul(gelu(i0), pow(tanh(i1), i0))"}, ["f32[T,600]", "f32[T,600]"]),
        ("copy", {"kind": "transpose", "perm": (0, 2, 1)}, ["f32[T,3,64]"]),
        ("reduce", {"kind": "max"}, ["f32[T,600]"]),
        ("select_rows", {}, ["f32[T,600]", "i32[S]"]),
        ("mean_squares", {"widths": (1200,)}, ["f32[T,600]"]),
        ("causal_conv", {"state": 0, "channels": 600, "taps": 4, "activation": "silu"}, ["f32[T,600]", "f32[600,4]"]),
        (
            "selective_scan", {"state": 0, "channels": 600, "state_size": 16},
            ["f32[T,600]", "f32[T,16]", "f32[T,16]", "f32[T,600]", "f32[600,16]"],
        ),
        (
            "ssd_scan", {"state": 0, "heads": 8, "head_dim": 64, "groups": 1, "state_size": 128},
            ["f32[T,512]", "f32[T,128]", "f32[T,128]", "f32[T,8]", "f32[8]"],
        ),
        (
            "gated_delta",
            {
                "state": 0, "heads": 8, "key_heads": 4, "key_dim": 128, "value_dim": 128, "scale": 0.1,
                "normalize": True, "per_key": True,
            },
            ["f32[T,512]", "f32[T,512]", "f32[T,1024]", "f32[T,1024]", "f32[T,8]"],
        ),
    ],
)  # fmt: skip
def test_rows(name: str, attrs: dict[str, Any], texts: list[str]) -> None:
    check(compiled(name, OPERATORS[name].attrs(**attrs), texts, 90, True), 90, False)


def test_a_row_program() -> None:
    texts, attrs = PROGRAMS["masks and pieces"]
    check(compiled("rowwise", attrs, texts, 90, True), 90, False)


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize(
    ("expr", "joined"),
    [
        ("round(mul(i0, i1))", False),
        ("round(mul(i0, 3))", False),
        ("round(square(i0))", False),
        ("add(mul(i0, i1), i1)", True),
    ],
)
def test_what_is_rounded_is_the_product_itself(expr: str, joined: bool, sm: int) -> None:
    """A product that is added to becomes one instruction with the addition: rounding must add nothing to it."""
    attrs = OPERATORS["pointwise"].attrs(expr)
    ((_, cubin),) = compiled("pointwise", attrs, ["f32[T,600]"] * (2 if "i1" in expr else 1), sm, True)
    found = [name for name in instructions(cubin.code) if name.startswith("FFMA")]
    assert bool(found) == joined, found
