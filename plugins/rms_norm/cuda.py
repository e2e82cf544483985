"""How the cuda targets call rms_norm. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.norm import norm_call
from llmc.plugins.rms_norm import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """One weight, after x."""
    return (norm_call("rms_norm", ["weight"], attrs.eps, attrs.residual, attrs.quantize, inputs, outputs),)
