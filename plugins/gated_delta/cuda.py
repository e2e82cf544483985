"""How the cuda targets call gated_delta. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Product
from llmc.plugins.cuda.recurrent import WARPS, channels_of, recurrent_args, slot_numbers
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.gated_delta import NORM_EPS, Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence, head and piece of its values' channels."""
    block = channels_of(attrs.value_dim, attrs.key_dim)
    call = CudaCall(
        kernel="gated_delta.kernels:gated_delta",
        args=recurrent_args(attrs.state, ("q", "k", "v", "g", "beta")),
        constexprs={
            "GROUP": attrs.heads // attrs.key_heads,
            "KEY": attrs.key_dim,
            "KEY_BLOCK": power_of_two(attrs.key_dim),
            "VALUE": attrs.value_dim,
            "SCALE": float(attrs.scale),
            "NORM_EPS": NORM_EPS if attrs.normalize else None,
            "PER_KEY": attrs.per_key,
            "SLOT": slot_numbers(env),
            "BLOCK": block,
        },
        grid=((Product(("num_seqs",)),), (Product((attrs.heads,)),), (Product((attrs.value_dim,), block),)),
        num_warps=WARPS,
    )
    return (call,)
