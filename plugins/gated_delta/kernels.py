"""gated_delta in Triton: a program walks over a sequence's tokens with its channels' states in registers. Imported by
the compiler and the interpreter alone.
"""

import triton
import triton.language as tl

from llmc.plugins.cuda.kernels import numbers, slot_of, tokens_of
from llmc.plugins.pointwise.kernels import exp


@triton.jit
def direction(at, known, NORM_EPS: tl.constexpr):
    """A query or key; with NORM_EPS, of length 1."""
    vector = numbers(at, known)
    if NORM_EPS is not None:
        vector = vector / tl.sqrt_rn(tl.sum(vector * vector, axis=0) + NORM_EPS)
    return vector


@triton.jit
def gated_delta(
    q,
    k,
    v,
    g,
    beta,
    y,
    states,
    query_start,
    context_len,
    state_slots,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    y_stride,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    PER_KEY: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """q and k [T, key heads*KEY], v [T, heads*VALUE], g [T, heads] or PER_KEY [T, heads*KEY], beta [T, heads] -> y;
    program (sequence, head, BLOCK channels). GROUP heads share q and k. `states`: [heads, KEY, VALUE] a slot, SLOT
    numbers apart; zero where a sequence begins.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.arange(0, KEY_BLOCK)
    inside, known = columns < VALUE, entries < KEY
    both = known[:, None] & inside[None, :]
    first, last = tokens_of(sequence, query_start)
    length = tl.load(context_len + sequence)
    if length > 0:
        own = slot_of(sequence, states, state_slots, SLOT) + head * (KEY * VALUE)
        place = own + entries[:, None] * VALUE + columns[None, :]
        state = tl.load(place, mask=both & (length > last - first), other=0.0)
        shared = (head // GROUP) * KEY + entries
        for token in range(first, last):
            row = tl.cast(token, tl.int64)
            query = direction(q + row * q_stride + shared, known, NORM_EPS) * SCALE
            key = direction(k + row * k_stride + shared, known, NORM_EPS)
            value = numbers(v + row * v_stride + head * VALUE + columns, inside)
            rate = tl.load(beta + row * beta_stride + head).to(tl.float32)
            if PER_KEY:
                decay = numbers(g + row * g_stride + head * KEY + entries, known)
                state *= exp(decay)[:, None]
            else:
                state *= exp(tl.load(g + row * g_stride + head).to(tl.float32))
            change = rate * (value - tl.sum(key[:, None] * state, axis=0))
            state += key[:, None] * change[None, :]
            result = tl.sum(query[:, None] * state, axis=0)
            at = y + row * y_stride + head * VALUE + columns
            tl.store(at, result.to(y.dtype.element_ty), mask=inside)
        tl.store(place, state, mask=both)
