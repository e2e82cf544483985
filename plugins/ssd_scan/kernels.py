"""ssd_scan in Triton: a program walks over a sequence's tokens with its channels' states in registers. Imported by the
compiler and the interpreter alone.
"""

import triton
import triton.language as tl

from llmc.plugins.cuda.kernels import numbers, slot_of, tokens_of
from llmc.plugins.pointwise.kernels import exp


@triton.jit
def ssd_scan(
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
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [T, heads*WIDTH], b and c [T, groups*SIZE], step [T, heads], decay [heads] -> y; program (sequence, head, BLOCK
    channels). GROUP heads share b and c. `states`: [heads, SIZE, WIDTH] a slot, SLOT numbers apart; zero where a
    sequence begins. `skip` [heads] (or None): by what x is added.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.arange(0, SIZE_BLOCK)
    inside, known = columns < WIDTH, entries < SIZE
    both = known[:, None] & inside[None, :]
    first, last = tokens_of(sequence, query_start)
    length = tl.load(context_len + sequence)
    if length > 0:
        own = slot_of(sequence, states, state_slots, SLOT) + head * (SIZE * WIDTH)
        place = own + entries[:, None] * WIDTH + columns[None, :]
        state = tl.load(place, mask=both & (length > last - first), other=0.0)
        rate = tl.load(decay + head)
        for token in range(first, last):
            row = tl.cast(token, tl.int64)
            value = numbers(x + row * x_stride + head * WIDTH + columns, inside)
            size = tl.load(step + row * step_stride + head).to(tl.float32)
            shared = (head // GROUP) * SIZE + entries
            enter = numbers(b + row * b_stride + shared, known)
            leave = numbers(c + row * c_stride + shared, known)
            state = state * exp(rate * size) + enter[:, None] * (size * value)[None, :]
            result = tl.sum(leave[:, None] * state, axis=0)
            if skip is not None:
                result += tl.load(skip + head) * value
            at = y + row * y_stride + head * WIDTH + columns
            tl.store(at, result.to(y.dtype.element_ty), mask=inside)
        tl.store(place, state, mask=both)
