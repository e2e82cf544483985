"""What launches of recurrent operators have in common on the cuda targets: a sequence's tokens, and its slot.

Comes in: the number of a state, inputs by name. Goes out: `CudaCall`s. Must not know: builder, runtime, operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, States, StepArray
from llmc.plugins.cuda.rows import power_of_two

#: Numbers of a program's state, which lie in the registers of two warps.
STATE_NUMBERS = 1024
WARPS = 2


def recurrent_call(
    operator: str,
    state: int,
    inputs: Sequence[TensorType],
    env: CudaEnv,
    *,
    rows: Sequence[str],
    others: Sequence[str] = (),
    constexprs: Mapping[str, int | float | bool | None],
    channels: int,
    block: int,
    heads: int | None = None,
    num_warps: int = WARPS,
) -> CudaCall:
    """A program for each sequence, each of `heads` if there are any, and `block` of (a head's) `channels`.

    Output 0 is `y`. The first inputs are matrices with a row a token, which the kernel calls `rows`; behind them are
    `others`, the last of which may be missing: the kernel knows that as a constant.
    """
    args: dict[str, Arg] = {
        "y": Pointer("out", 0),
        "y_stride": RowStride("out", 0),
        "states": States(state),
        "query_start": StepArray("query_start"),
        "context_len": StepArray("context_len"),
        "state_slots": StepArray("state_slots"),
    }
    for index, name in enumerate(rows):
        args |= {name: Pointer("in", index), f"{name}_stride": RowStride("in", index)}
    given = others[: len(inputs) - len(rows)]
    args |= {name: Pointer("in", index) for index, name in enumerate(given, len(rows))}
    axes = [Product(("num_seqs",)), *([Product((heads,))] if heads else []), Product((channels,), block)]
    return CudaCall(
        kernel=f"{operator}.kernels:{operator}",
        args=args,
        constexprs={
            **{name: None for name in others if name not in given},
            **constexprs,
            "SLOT": env.slot_bytes // 4,  # f32s
            "BLOCK": block,
        },
        grid=tuple((axis,) for axis in axes),
        num_warps=num_warps,
    )


def channels_of(channels: int, entries: int) -> int:
    """Channels of a program, a power of two, where each has `entries` numbers of state."""
    return min(power_of_two(channels), max(1, STATE_NUMBERS // power_of_two(entries)))
