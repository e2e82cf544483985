"""How the cuda targets call selective_scan. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.recurrent import channels_of, recurrent_call
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.selective_scan import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence and piece of channels."""
    return (
        recurrent_call(
            "selective_scan",
            attrs.state,
            inputs,
            env,
            rows=("x", "b", "c", "step"),
            others=("decay", "skip"),
            constexprs={
                "WIDTH": attrs.channels,
                "SIZE": attrs.state_size,
                "SIZE_BLOCK": power_of_two(attrs.state_size),
            },
            channels=attrs.channels,
            block=channels_of(attrs.channels, attrs.state_size),
        ),
    )
