"""causal_conv in Triton: a program walks over a sequence's tokens. Imported by compiler and interpreter alone."""

import triton
import triton.language as tl

from llmc.plugins.cuda.kernels import slot_of, tokens_of
from llmc.plugins.pointwise.kernels import silu


@triton.jit
def entry(x, own, at, first, x_stride, fresh, columns, inside, TAPS: tl.constexpr, WIDTH: tl.constexpr):
    """Input `at` of a sequence whose tokens of this step begin at `first`: what is before them is in its state, or
    0.
    """
    here = at >= first
    value = tl.load(x + at.to(tl.int64) * x_stride + columns, mask=inside & here, other=0.0).to(tl.float32)
    kept = tl.load(own + (at - first + TAPS - 1) * WIDTH + columns, mask=inside & (at < first), other=0.0)
    return tl.where(here, value, tl.where(fresh, 0.0, kept))


@triton.jit
def causal_conv(
    x,
    weight,
    bias,
    y,
    states,
    query_start,
    context_len,
    state_slots,
    x_stride,
    y_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [T, WIDTH], weight [WIDTH, TAPS] -> y; program (sequence, BLOCK channels). `states`: TAPS - 1 inputs a slot,
    SLOT numbers apart. A thread reads and writes its own channels alone, so the state can be moved up in place.
    """
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    first, last = tokens_of(sequence, query_start)
    length = tl.load(context_len + sequence)
    if length > 0:
        fresh = length == last - first
        own = slot_of(sequence, states, state_slots, SLOT)
        for token in range(first, last):
            total = tl.zeros([BLOCK], tl.float32)
            if bias is not None:
                total += tl.load(bias + columns, mask=inside, other=0.0)
            for k in tl.static_range(TAPS):
                at = token - (TAPS - 1) + k
                value = entry(x, own, at, first, x_stride, fresh, columns, inside, TAPS, WIDTH)
                total += value * tl.load(weight + columns * TAPS + k, mask=inside, other=0.0)
            if SILU:
                total = silu(total)
            tl.store(y + tl.cast(token, tl.int64) * y_stride + columns, total.to(y.dtype.element_ty), mask=inside)
        for k in tl.static_range(TAPS - 1):
            value = entry(x, own, last - (TAPS - 1) + k, first, x_stride, fresh, columns, inside, TAPS, WIDTH)
            tl.store(own + k * WIDTH + columns, value, mask=inside)
