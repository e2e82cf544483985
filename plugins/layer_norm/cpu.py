"""How the cpu target calls layer_norm.

Comes in: attributes and types. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv
from llmc.plugins.cpu.norm import norm_call
from llmc.plugins.layer_norm import Attrs


def launch(attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: KernelEnv) -> CpuCall:
    """Weight and bias, after x."""
    return norm_call("layer_norm", 2, attrs.eps, attrs.residual, inputs, outputs)
