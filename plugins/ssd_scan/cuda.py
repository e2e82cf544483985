"""How the cuda targets call ssd_scan. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer
from llmc.plugins.cuda.call import CudaCall, CudaEnv, Product
from llmc.plugins.cuda.recurrent import WARPS, channels_of, recurrent_args, slot_numbers
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.ssd_scan import Attrs


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence, head and piece of its channels."""
    args = recurrent_args(attrs.state, ("x", "b", "c", "step")) | {"decay": Pointer("in", 4)}
    if attrs.skip:
        args["skip"] = Pointer("in", 5)
    block = channels_of(attrs.head_dim, attrs.state_size)
    call = CudaCall(
        kernel="ssd_scan.kernels:ssd_scan",
        args=args,
        constexprs={
            **({} if attrs.skip else {"skip": None}),
            "GROUP": attrs.heads // attrs.groups,
            "WIDTH": attrs.head_dim,
            "SIZE": attrs.state_size,
            "SIZE_BLOCK": power_of_two(attrs.state_size),
            "SLOT": slot_numbers(env),
            "BLOCK": block,
        },
        grid=((Product(("num_seqs",)),), (Product((attrs.heads,)),), (Product((attrs.head_dim,), block),)),
        num_warps=WARPS,
    )
    return (call,)
