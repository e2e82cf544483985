"""selective_scan in Triton: a program walks over a sequence's tokens with its channels' states in registers. Imported
by the compiler and the interpreter alone.
"""

import triton
import triton.language as tl

from llmc.plugins.cuda.kernels import numbers, slot_of, tokens_of
from llmc.plugins.pointwise.kernels import exp


@triton.jit
def selective_scan(
    x,
    b,
    c,
    step,
    decay,
    skip,
    y,
    states,
    query_start,
    context_len,
    state_slots,
    x_stride,
    b_stride,
    c_stride,
    step_stride,
    y_stride,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x and step [T, WIDTH], b and c [T, SIZE], decay [WIDTH, SIZE] -> y; program (sequence, BLOCK channels). `states`:
    [SIZE, WIDTH] a slot, SLOT numbers apart; zero where a sequence begins. `skip` (or None): what x is added by.
    """
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.arange(0, SIZE_BLOCK)
    inside, known = columns < WIDTH, entries < SIZE
    both = known[:, None] & inside[None, :]
    first, last = tokens_of(sequence, query_start)
    length = tl.load(context_len + sequence)
    if length > 0:
        own = slot_of(sequence, states, state_slots, SLOT)
        place = own + entries[:, None] * WIDTH + columns[None, :]
        state = tl.load(place, mask=both & (length > last - first), other=0.0)
        rate = tl.load(decay + columns[None, :] * SIZE + entries[:, None], mask=both, other=0.0)
        for token in range(first, last):
            row = tl.cast(token, tl.int64)
            value = numbers(x + row * x_stride + columns, inside)
            size = numbers(step + row * step_stride + columns, inside)
            enter = numbers(b + row * b_stride + entries, known)
            leave = numbers(c + row * c_stride + entries, known)
            state = state * exp(rate * size[None, :]) + enter[:, None] * (size * value)[None, :]
            result = tl.sum(leave[:, None] * state, axis=0)
            if skip is not None:
                result += tl.load(skip + columns, mask=inside, other=0.0) * value
            tl.store(y + row * y_stride + columns, result.to(y.dtype.element_ty), mask=inside)
        tl.store(place, state, mask=both)
