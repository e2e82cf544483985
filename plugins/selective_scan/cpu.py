"""How the cpu target calls selective_scan. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv
from llmc.plugins.cpu.scan import scan_call
from llmc.plugins.selective_scan import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """x, B, C and dt may have rows that lie apart. Needs `env.state_offsets[state]`."""
    a = attrs
    return scan_call("selective_scan", (a.channels, a.state_size), a.skip, a.state, env)
