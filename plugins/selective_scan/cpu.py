"""How the cpu target calls selective_scan. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Literal, Pointer, RowStride
from llmc.plugins.selective_scan import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x, B, C and dt may have rows that lie apart. Needs `env.state_offsets[state]`."""
    return CpuCall(
        header="plugins/selective_scan/cpu.h",
        function=f"selective_scan<{attrs.channels}, {attrs.state_size}>",
        args=(
            *(Pointer("in", i) for i in range(4)),
            *(RowStride("in", i) for i in range(4)),
            Pointer("in", 4),
            Pointer("in", 5) if attrs.skip else Literal("nullptr"),
            Pointer("out", 0),
            Literal(str(env.state_offsets[attrs.state])),
            Literal(str(env.slot_bytes)),
        ),
        strided=frozenset(Pointer("in", i) for i in range(4)),
    )
