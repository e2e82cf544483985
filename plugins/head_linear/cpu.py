"""How the cpu target calls head_linear: linear's panels and tiles, a head after the other.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import PANEL, CpuCall, KernelEnv, Literal, Pointer, Product, RowStride, Scratch
from llmc.plugins.head_linear import Attrs
from llmc.plugins.linear.cpu import FORMATS, THREAD_FLOATS


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x may have a row stride. Scratch: the rows of every head in tiles, once a rank."""
    x, w = inputs
    heads, n, k = (int(d) for d in w.shape)
    most = env.bounds(x.shape[0])[1]
    return CpuCall(
        header="plugins/head_linear/cpu.h",
        function=f"head_linear<{heads}, {n}, {k}, llmc::lin::{FORMATS[w.dtype]}>",
        args=(
            Product((x.shape[0],)),
            Pointer("in", 0),
            RowStride("in", 0),
            Literal(str(int(x.shape[1]) // heads)),
            Literal(str(attrs.start)),
            Pointer("in", 1),
            Pointer("out", 0),
        ),
        packing={1: f"panels({{}}, {PANEL})"},
        strided=frozenset({Pointer("in", 0)}),
        scratch=Scratch(shared=4 * most * heads * k, per_thread=4 * THREAD_FLOATS),
    )
