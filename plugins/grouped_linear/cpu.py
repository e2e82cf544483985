"""How the cpu target calls grouped_linear: linear's panels, tiles and formats, an expert after the other.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import PANEL, Arg, CpuCall, KernelEnv, Literal, Pointer, Product, RowStride, Scratch
from llmc.plugins.grouped_linear import Attrs
from llmc.plugins.linear.cpu import FORMATS, THREAD_FLOATS, int4_weight, prepared_input
from llmc.plugins.pointwise.cpu import formula_struct


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Inputs as in `infer`; an x of one row a token may have a row stride.

    Scratch: the rows by expert, with each row's factor, once a rank; the order of the rows for each thread.
    """
    x, index, w = inputs[:3]
    experts, n, k = (int(d) for d in w.shape)
    slots = int(index.shape[1])
    most = env.bounds(index.shape[0])[1]
    kind, x_prepared, width = prepared_input(w, attrs.x_scale, attrs.x_per_token, attrs.group_start)
    weight: Arg = Pointer("in", 2)
    packed = [2]
    if w.dtype == "u4":
        weight, packed = int4_weight(2, attrs.group_start), [2, 3, 4]
    struct, prelude = formula_struct(attrs.expr, 1 + attrs.gated)
    flags = ", ".join("true" if f else "false" for f in (attrs.gated, attrs.bias, attrs.combine, attrs.all_reduce))
    null = Literal("nullptr")
    one_row = x.rank == 2
    args: tuple[Arg, ...] = (
        Product(index.shape[:1]),
        Pointer("in", 0),
        RowStride("in", 0) if one_row else Product((slots, k)),
        Literal("0" if one_row else str(k)),
        Pointer("in", 1),
        x_prepared,
        weight,
        Pointer("in", 3) if w.dtype in ("f8e4m3", "i8") else null,
        Pointer("in", len(inputs) - 1 - attrs.combine) if attrs.bias else null,
        Pointer("in", len(inputs) - 1) if attrs.combine else null,
        Pointer("out", 0),
    )
    return CpuCall(
        header="plugins/grouped_linear/cpu.h",
        function=f"grouped_linear<{k}, {n}, {experts}, {slots}, lin::{FORMATS[w.dtype]}, lin::{kind}, "
        f"{struct}, {flags}>",
        args=args,
        prelude=prelude,
        packing=dict.fromkeys(packed, f"panels{'_gated' * attrs.gated}({{}}, {PANEL})"),
        strided=frozenset({Pointer("in", 0)} if one_row else ()),
        scratch=Scratch(
            shared=4 * most * slots * (width + 1), per_thread=4 * (THREAD_FLOATS + experts + 1 + most * slots)
        ),
        sums_ranks=4 * n if attrs.all_reduce else 0,
    )
