"""How the cuda targets call gated_delta. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cuda.call import CudaCall, CudaEnv
from llmc.plugins.cuda.recurrent import channels_of, recurrent_call
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.gated_delta import NORM_EPS, Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence, head and piece of its values' channels."""
    return (
        recurrent_call(
            "gated_delta",
            attrs.state,
            inputs,
            env,
            rows=("q", "k", "v", "g", "beta"),
            constexprs={
                "GROUP": attrs.heads // attrs.key_heads,
                "KEY": attrs.key_dim,
                "KEY_BLOCK": power_of_two(attrs.key_dim),
                "VALUE": attrs.value_dim,
                "SCALE": float(attrs.scale),
                "NORM_EPS": NORM_EPS if attrs.normalize else None,
                "PER_KEY": attrs.per_key,
            },
            channels=attrs.value_dim,
            block=channels_of(attrs.value_dim, attrs.key_dim),
            heads=attrs.heads,
        ),
    )
