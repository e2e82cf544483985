"""How the cpu target calls linear. Weights are read in panels of 64 outputs; see formats.h for the bytes.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import PANEL, Arg, Call, CpuCall, KernelEnv, Literal, Pointer, Product, RowStride, Scratch
from llmc.plugins.cpu.products import BF16_TILE
from llmc.plugins.linear import FACTORS, Attrs, groups

FORMATS = {"f32": "Fp32", "bf16": "Bf16", "f8e4m3": "Fp8", "i8": "Int8", "u4": "Int4"}
_ACTIVATIONS = {"none": "Linear", "relu": "Relu", "silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh"}
#: Floats of a thread beside one row of x: a piece (at most half a panel) of the largest block, and the largest chunk of
#: rows, that tactics name (cpu.h).
THREAD_FLOATS = (512 // 2 + 512) * PANEL


def input_kind(x_scale: float | None, per_token: bool, scaled: bool) -> tuple[str, str]:
    """What a linear does to x before it multiplies, as a type and a value of quantize.h; `scaled`: by E4M3 weights."""
    kind = "PerToken" if per_token else "Static" if x_scale is not None else "Exact" if scaled else "Plain"
    return kind, f"llmc::lin::{kind}{{{_number(x_scale)}}}"


def int4_weight(at: int, group_start: int) -> Call:
    """An INT4 weight, its scales and zero points, which are inputs from `at` on."""
    parts = (Pointer("in", at), Pointer("in", at + 1), Pointer("in", at + 2), Literal(str(group_start)))
    return Call("llmc::lin::Int4Weight", parts)


def _number(scale: float | None) -> str:
    return "" if scale is None else f"{float(np.float32(scale)).hex()}f"


def prepared_input(
    w: TensorType, x_scale: float | None, per_token: bool, group_start: int, factors: Pointer | None = None
) -> tuple[str, Arg, int]:
    """What becomes of x beside w [...,K]: a type of quantize.h, int8.h or int4.h, a value of it, words of a row of
    it, at most. `factors`: of its columns, beside an INT8 weight.
    """
    k = int(w.shape[-1])
    if w.dtype == "u4":
        # As int4.h has them, and int4_tiles.h, where the first and the last group may be filled up to whole steps.
        words = max(k + groups(k, group_start), k // 2 + BF16_TILE)
        return "Grouped", Literal(f"llmc::lin::Grouped{{{group_start}}}"), words
    if w.dtype == "i8":
        scale = "Int8Static" if x_scale is not None else "Int8PerToken"
        value = Literal(f"llmc::lin::{scale}{{{_number(x_scale)}}}")
        kind = f"Int8Input<llmc::lin::{scale}>"
        return kind, Call(f"llmc::lin::{kind}", (factors or Literal("nullptr"), value)), -(-k // 2)
    kind, prepared = input_kind(x_scale, per_token, w.dtype == "f8e4m3")
    return kind, Literal(prepared), k


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Inputs as in `infer`; x and y may have a row stride, but for the y of an all-reduce. An INT4 weight's scales and
    zero points are packed like it.
    """
    x, w = inputs[0], inputs[1]
    n, k = (int(d) for d in w.shape)
    least, most = env.bounds(x.shape[0])
    quantized, grouped = w.dtype in ("f8e4m3", "i8"), w.dtype == "u4"
    act, gate, _ = attrs.epilogue.partition("_gate")
    factors = Pointer("in", FACTORS) if attrs.x_factors else None
    kind, x_prepared, width = prepared_input(w, attrs.x_scale, attrs.x_per_token, attrs.group_start, factors)
    flags = ", ".join("true" if f else "false" for f in (bool(gate), attrs.bias, attrs.all_reduce))
    null = Literal("nullptr")
    weight = int4_weight(1, attrs.group_start) if grouped else Pointer("in", 1)
    args: tuple[Arg, ...] = (
        Product((x.shape[0],)),
        Pointer("in", 0),
        RowStride("in", 0),
        x_prepared,
        weight,
        Pointer("in", 2) if quantized else null,
        Pointer("in", len(inputs) - 1) if attrs.bias else null,
        Pointer("out", 0),
        RowStride("out", 0),
    )
    return CpuCall(
        header="plugins/linear/cpu.h",
        function=f"linear<{k}, {n}, {least}, {most}, lin::{FORMATS[w.dtype]}, lin::{kind}, "
        f"lin::{_ACTIVATIONS[act]}, {flags}>",
        args=args,
        packing=dict.fromkeys((1, 2, 3) if grouped else (1,), f"panels{gate and '_gated'}({{}}, {PANEL})"),
        strided=frozenset({Pointer("in", 0)} | ({Pointer("out", 0)} if not attrs.all_reduce else set())),
        scratch=Scratch(shared=4 * most * (width + 1) if most > 1 else 0, per_thread=4 * max(width, THREAD_FLOATS)),
        sums_ranks=4 * n if attrs.all_reduce else 0,
    )
