"""How the cuda targets call selective_scan. Must not know: builder, runtime."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, States, StepArray
from llmc.plugins.cuda.rows import power_of_two
from llmc.plugins.selective_scan import Attrs

#: Numbers of a program's state, which lie in registers.
_NUMBERS = 1024


def launch(
    attrs: Attrs, inputs: Sequence[TensorType], outputs: Sequence[TensorType], env: CudaEnv
) -> tuple[CudaCall, ...]:
    """A program for each sequence and piece of channels."""
    args: dict[str, Arg] = {
        "y": Pointer("out", 0),
        "y_stride": RowStride("out", 0),
        "decay": Pointer("in", 4),
        "states": States(attrs.state),
        "query_start": StepArray("query_start"),
        "context_len": StepArray("context_len"),
        "state_slots": StepArray("state_slots"),
    }
    for index, name in enumerate(("x", "b", "c", "step")):
        args |= {name: Pointer("in", index), f"{name}_stride": RowStride("in", index)}
    if attrs.skip:
        args["skip"] = Pointer("in", 5)
    entries = power_of_two(attrs.state_size)
    block = min(power_of_two(attrs.channels), max(1, _NUMBERS // entries))
    call = CudaCall(
        kernel="selective_scan.kernels:selective_scan",
        args=args,
        constexprs={
            **({} if attrs.skip else {"skip": None}),
            "WIDTH": attrs.channels,
            "SIZE": attrs.state_size,
            "SIZE_BLOCK": entries,
            "SLOT": env.slot_bytes // 4,
            "BLOCK": block,
        },
        grid=((Product(("num_seqs",)),), (Product((attrs.channels,), block),)),
        num_warps=2,
    )
    return (call,)
