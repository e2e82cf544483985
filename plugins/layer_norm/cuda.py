"""How the cuda targets call layer_norm. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.norm import norm_call
from llmc.plugins.layer_norm import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """Weight and bias, after x."""
    return (norm_call("layer_norm", ["weight", "bias"], attrs.eps, attrs.residual, attrs.quantize, inputs, outputs),)
