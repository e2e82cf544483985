"""Every kind of product on every architecture, as it is compiled by the target's own tactics: nothing spills, tensor
cores do the work, and on Hopper sums of E4M3 products leave the tensor cores in time. Compiled, not run on a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from llmc.artifacts.types import TensorType
from llmc.builder.cuda.cubin import Cubin
from llmc.builder.cuda.sass import listing
from llmc.builder.cuda.variant import FP8_SM, Variant
from llmc.plugins import OPERATORS, grouped_linear, linear
from llmc.plugins.cuda.call import CudaEnv
from llmc.plugins.paged_attention.cuda import layer_bytes
from tests.unit.cuda.compiled import check_cubin, compiled, variants
from tests.unit.cuda.test_compiled_products import env_of

ARCHITECTURES = (80, 89, 90, 100, 120)
FP8_ARCHITECTURES = tuple(sm for sm in ARCHITECTURES if sm >= FP8_SM)
#: What multiplies bf16, E4M3 and INT8, in warps or in groups of warps.
BF16, FP8, INT8 = r"HMMA.*BF16|HGMMA.*BF16|UTCHMMA", r"QMMA.*E4M3|QGMMA.*E4M3|UTCQMMA", "IMMA|IGMMA|UTCIMMA"
HEADS, KV_HEADS, WIDTHS = 32, 8, (64, 128, 256)
EXPERTS, SLOTS, DEPTH, SIZE = 8, 2, 1024, 1536
#: How many products of E4M3 Hopper may add with 14 bits before float32 takes them over, and one instruction's.
IMPRECISE, IN_ONE = 128, 32


@dataclass(frozen=True)
class Case:
    """A node whose launch `kernel` multiplies by instructions like `expected`."""

    name: str
    operator: str
    attrs: Any
    texts: tuple[str, ...]
    env: CudaEnv
    kernel: str
    expected: str

    def made(self) -> list[Variant]:
        return variants(OPERATORS[self.operator], self.attrs, [TensorType.parse(text) for text in self.texts], self.env)


def attention_env(sm: int, decode: bool, width: int, kv_dtype: str) -> CudaEnv:
    stored: Any = {("in", 0): "bf16", ("out", 0): "bf16"}
    return CudaEnv(
        sm, (1, 64) if decode else (1, 2048), decode, kv_dtype=kv_dtype, max_context=8192, stored=stored,
        kv_block_bytes=4 * layer_bytes(KV_HEADS, width, width, 16, kv_dtype),
    )  # fmt: skip


def attention(sm: int, decode: bool, width: int, fp8: bool) -> Case:
    scales = (tuple(0.1 + i for i in range(KV_HEADS)),) * 2 if fp8 else None
    attrs = OPERATORS["paged_attention"].attrs(
        layer=0, heads=HEADS, kv_heads=KV_HEADS, head_dim=width, scale=0.09, kv_scales=scales
    )
    kernel = "decode" if decode else "mixed"
    name = f"sm_{sm} {kernel} {width}{' fp8' if fp8 else ''}"
    env = attention_env(sm, decode, width, "f8e4m3" if fp8 else "bf16")
    return Case(name, "paged_attention", attrs, (f"f32[T,{HEADS},{width}]",), env, kernel, BF16)


def latent(sm: int, decode: bool) -> Case:
    attrs, kernel = OPERATORS["latent_attention"].attrs(0, 16, 512, 64, 0.1), "decode" if decode else "mixed"
    stored: Any = {("in", 0): "bf16", ("in", 1): "bf16"}
    env = CudaEnv(sm, (1, 64) if decode else (1, 2048), decode, max_context=8192, stored=stored, kv_block_bytes=1 << 16)
    return Case(
        f"sm_{sm} latent {kernel}", "latent_attention", attrs, ("f32[T,8192]", "f32[T,1024]"), env, kernel, BF16
    )


def experts(sm: int, fp8: bool) -> Case:
    attrs = grouped_linear.Attrs(gated=True, expr="mul(silu(i0), i1)")
    weights = f"{'f8e4m3' if fp8 else 'bf16'}[{EXPERTS},{SIZE},{DEPTH}]"
    texts = [f"{'f8e4m3' if fp8 else 'f32'}[T,{DEPTH}]", f"i32[T,{SLOTS}]", weights]
    texts += [f"f32[{EXPERTS},{SIZE}]", "f32[T,1]"] if fp8 else []
    env = env_of(sm, False, "grouped_linear")
    name = f"sm_{sm} experts {'fp8' if fp8 else 'bf16'}"
    return Case(name, "grouped_linear", attrs, tuple(texts), env, "experts", FP8 if fp8 else BF16)


def product(sm: int, kind: str, decode: bool = True) -> Case:
    """Of few rows, or of many; a weight of FP8 alone is multiplied in bf16."""
    dtype = kind.split()[0]
    texts = [f"{'f8e4m3' if kind == 'f8e4m3 x' else 'f32'}[T,{DEPTH}]", f"{dtype}[{SIZE},{DEPTH}]"]
    if dtype == "u4":
        texts += [f"f16[{SIZE},{linear.groups(DEPTH)}]", f"u4[{SIZE},{linear.groups(DEPTH)}]"]
    if dtype in ("f8e4m3", "i8"):
        texts.append(f"f32[{SIZE}]")
    if kind == "f8e4m3 x":
        texts.append("f32[T,1]")
    expected = {"f8e4m3 x": FP8, "i8": INT8}.get(kind, BF16)
    attrs = linear.Attrs(x_per_token=kind == "i8")
    env = env_of(sm, decode)
    if texts[0].startswith("f32"):  # as in a program, where all its readers round it
        env = replace(env, stored={("in", 0): "bf16"})
    kernel = "gemm_int4" if dtype == "u4" else "gemm"
    return Case(
        f"sm_{sm} {'skinny' if decode else 'wide'} {kind}", "linear", attrs, tuple(texts), env, kernel, expected
    )


CASES = [
    *(attention(sm, decode, width, False) for sm in ARCHITECTURES for decode in (True, False) for width in WIDTHS),
    *(attention(sm, decode, 128, True) for sm in FP8_ARCHITECTURES for decode in (True, False)),
    *(latent(sm, decode) for sm in ARCHITECTURES for decode in (True, False)),
    *(experts(sm, False) for sm in ARCHITECTURES),
    *(experts(sm, True) for sm in FP8_ARCHITECTURES),
    *(product(sm, kind) for sm in ARCHITECTURES for kind in ("bf16", "i8", "u4")),
    *(product(sm, kind) for sm in FP8_ARCHITECTURES for kind in ("f8e4m3", "f8e4m3 x")),
    *(product(sm, "f8e4m3 x", False) for sm in FP8_ARCHITECTURES),
]  # fmt: skip


@pytest.fixture(scope="module")
def cubins() -> dict[Variant, Cubin]:
    """All at once, so that the processors share the work; from the cache where nothing has changed."""
    made = list(dict.fromkeys(variant for case in CASES for variant in case.made()))
    return dict(zip(made, compiled(made), strict=True))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensor_cores_do_the_work_and_nothing_spills(case: Case, cubins: dict[Variant, Cubin]) -> None:
    found = {variant.kernel.rpartition(":")[2]: cubins[variant] for variant in case.made()}
    assert case.kernel in found
    for kernel, cubin in found.items():
        check_cubin(cubin, case.env.sm, case.expected if kernel == case.kernel else None)


@pytest.mark.timeout(1200)
def test_hopper_takes_sums_of_fp8_products_over_into_float32(cubins: dict[Variant, Cubin]) -> None:
    """Between any two runs of so many products stand additions; within a loop its end is its begin."""
    checked = 0
    for case in CASES:
        if case.env.sm != 90 or case.expected is not FP8:
            continue
        code = next(cubins[variant].code for variant in case.made() if variant.kernel.endswith(f":{case.kernel}"))
        runs = re.findall(r"G+", "".join(_KINDS.get(name.split(".")[0], "") for name in listing(code)))
        assert runs, case.name
        assert max(map(len, runs)) * IN_ONE <= IMPRECISE, case.name
        checked += 1
    assert checked == 3


#: Instructions that multiply E4M3, and those that add in float32.
_KINDS = {"QGMMA": "G", "FADD": "A", "FFMA": "A", "FADD2": "A"}
