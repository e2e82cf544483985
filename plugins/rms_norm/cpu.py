"""How the cpu target calls rms_norm.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv
from llmc.plugins.cpu.norm import norm_call
from llmc.plugins.rms_norm import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """One weight, after x."""
    return norm_call("rms_norm", 1, attrs.eps, attrs.residual, inputs, outputs)
