"""How the cuda targets call ssd_scan. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.recurrent import channels_of, recurrent_call
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.ssd_scan import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence, head and piece of its channels."""
    return (
        recurrent_call(
            "ssd_scan",
            attrs.state,
            inputs,
            env,
            rows=("x", "b", "c", "step"),
            others=("decay", "skip"),
            constexprs={
                "GROUP": attrs.heads // attrs.groups,
                "WIDTH": attrs.head_dim,
                "SIZE": attrs.state_size,
                "SIZE_BLOCK": power_of_two(attrs.state_size),
            },
            channels=attrs.head_dim,
            block=channels_of(attrs.head_dim, attrs.state_size),
            heads=attrs.heads,
        ),
    )
