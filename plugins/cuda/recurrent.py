"""What launches of recurrent operators have in common on the cuda targets: a sequence's tokens, and its slot.

Comes in: the number of a state, inputs by name. Goes out: arguments for `CudaCall`s. Must not know: builder, runtime,
operators.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.plugins.cpu.call import Pointer, RowStride
from llmc.plugins.cuda.call import Arg, CudaEnv, States, StepArray
from llmc.plugins.cuda.rows import power_of_two

#: Numbers of a program's state, which lie in the registers of two warps.
STATE_NUMBERS = 1024
WARPS = 2


def recurrent_args(state: int, rows: Sequence[str]) -> dict[str, Arg]:
    """Output 0 is `y`; the first inputs are matrices with a row a token that the kernel calls `rows`, with their
    strides.
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
    return args


def channels_of(channels: int, entries: int) -> int:
    """Channels of a program, a power of two, where each has `entries` numbers of state."""
    return min(power_of_two(channels), max(1, STATE_NUMBERS // power_of_two(entries)))


def slot_numbers(env: CudaEnv) -> int:
    """f32s from one slot to the next."""
    return env.slot_bytes // 4
