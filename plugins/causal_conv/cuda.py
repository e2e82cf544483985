"""How the cuda targets call causal_conv. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.causal_conv import Attrs
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Product
from llmc.plugins.cuda.recurrent import recurrent_args, slot_numbers
from llmc.plugins.cuda.rows import power_of_two

#: Channels of a program: few, as sequences may be few too.
_CHANNELS = 128


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence and piece of channels."""
    args = recurrent_args(attrs.state, ("x",)) | {"weight": Pointer("in", 1)}
    if attrs.bias:
        args["bias"] = Pointer("in", 2)
    block = min(_CHANNELS, power_of_two(attrs.channels))
    call = CudaCall(
        kernel="causal_conv.kernels:causal_conv",
        args=args,
        constexprs={
            **({} if attrs.bias else {"bias": None}),
            "WIDTH": attrs.channels,
            "TAPS": attrs.taps,
            "SILU": attrs.activation == "silu",
            "SLOT": slot_numbers(env),
            "BLOCK": block,
        },
        grid=((Product(("num_seqs",)),), (Product((attrs.channels,), block),)),
        num_warps=1,
    )
    return (call,)
