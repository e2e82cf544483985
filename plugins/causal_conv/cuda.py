"""How the cuda targets call causal_conv. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.causal_conv import Attrs
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.recurrent import recurrent_call
from llmc.plugins.cuda.rows import power_of_two

#: Channels of a program: few, as sequences may be few too.
_CHANNELS = 128


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence and piece of channels."""
    return (
        recurrent_call(
            "causal_conv",
            attrs.state,
            inputs,
            env,
            rows=("x",),
            others=("weight", "bias"),
            constexprs={"WIDTH": attrs.channels, "TAPS": attrs.taps, "SILU": attrs.activation == "silu"},
            channels=attrs.channels,
            block=min(_CHANNELS, power_of_two(attrs.channels)),
            num_warps=1,
        ),
    )
