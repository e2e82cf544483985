"""How the cpu target calls select_rows.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer, Product, RowStride
from llmc.plugins.select_rows import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x may have a row stride."""
    x, rows = inputs
    return CpuCall(
        header="plugins/select_rows/cpu.h",
        function=f"select_rows<{x.shape[1]}>",
        args=(Product(rows.shape), Pointer("in", 0), RowStride("in", 0), Pointer("in", 1), Pointer("out", 0)),
        strided=frozenset({Pointer("in", 0)}),
    )
