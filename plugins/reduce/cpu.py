"""How the cpu target calls reduce.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer, Product, row_stride, strided_rows
from llmc.plugins.reduce import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x, where it is a matrix, may have a row stride."""
    (x,) = inputs
    return CpuCall(
        header="plugins/reduce/cpu.h",
        function=f"reduce<{x.shape[-1]}, red::{attrs.kind.capitalize()}>",
        args=(Product(x.shape[:-1]), Pointer("in", 0), row_stride("in", 0, x), Pointer("out", 0)),
        strided=strided_rows(inputs),
    )
