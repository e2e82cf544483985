"""How the cpu target calls embedding.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import C_TYPES, CpuCall, KernelEnv, Pointer, Product
from llmc.plugins.embedding import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Nothing has a row stride."""
    ids, table = inputs
    return CpuCall(
        header="plugins/embedding/cpu.h",
        function=f"embedding<{table.shape[1]}, {C_TYPES[table.dtype]}>",
        args=(Product(ids.shape), Pointer("in", 0), Pointer("in", 1), Pointer("out", 0)),
    )
