"""sampler in Triton: a program chooses the token of a row, as cpu.h and reference.py do, to the bit. Imported by the
compiler and the interpreter alone.

Weights are whole numbers, so sums are exact in any order. What is kept of the candidates' order is told by the least
weight in it, the `edge`, which is found two bits at a time, and by how many of those that weigh just that stay: nothing
is sorted. No product that is not exact is added to anything but by tl.fma: the compiler may join them, and the
reference does not.
"""

import triton
import triton.language as tl
from triton.language.random import philox_impl

from llmc.plugins.pointwise.kernels import number

LOWEST = tl.constexpr(-87.33654)
TWICE_LOG2_E = tl.constexpr(2 * 1.44269504088896341)
GREEDY_BELOW = tl.constexpr(1e-5)
#: The weight of the largest logit.
LARGEST = tl.constexpr(1073741824)


@triton.jit
def exp(x):
    """The bits of `exp` in reference.py, for x <= 0."""
    y = tl.maximum(x, LOWEST)
    # The nearest whole number, halves to even, without an addition to a product.
    twice = y * TWICE_LOG2_E
    below = tl.floor(twice)
    half = below.to(tl.int32)
    whole = (half + 1) >> 1
    whole -= tl.where((twice == below) & ((half & 1) != 0), whole & 1, 0)
    n = whole.to(tl.float32)
    r = tl.fma(n, number(x, -0.693359375), y)
    r = tl.fma(n, number(x, 2.12194440e-4), r)
    p = tl.fma(number(x, 1.9875691500e-4), r, number(x, 1.3981999507e-3))
    p = tl.fma(p, r, number(x, 8.3334519073e-3))
    p = tl.fma(p, r, number(x, 4.1665795894e-2))
    p = tl.fma(p, r, number(x, 1.6666665459e-1))
    p = tl.fma(p, r, number(x, 5.0000001201e-1))
    p = tl.fma(p, r * r, r) + 1.0
    power = ((whole + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < LOWEST, 0.0, p * power)


@triton.jit
def weigh(x, weights, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the weights of a row, i32; returns their sum."""
    inverse = tl.div_rn(1.0, temperature)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = exp((tl.load(x + ids, mask=ids < VOCAB, other=float("-inf")) - top) * inverse) * LARGEST
        # From 2^23 on floats are whole; below, adding it leaves no place for a fraction. Joined with the product it is
        # the same: a product by a power of two is exact.
        weight = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled).to(tl.int32)
        tl.store(weights + ids, weight, mask=ids < VOCAB)
        total += weight.to(tl.int64)
    tl.debug_barrier()  # other threads of the program read them
    return tl.sum(total, axis=0)


@triton.jit
def reach(weights, least, BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates weigh `least` (1 or more) or more; BY_MASS: what they weigh together."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < VOCAB, other=0)
        if BY_MASS:
            total += tl.where(weight >= least, weight, 0).to(tl.int64)
        else:
            total += (weight >= least).to(tl.int64)
    return tl.sum(total, axis=0)


@triton.jit
def digit_of(weights, edge, step, wanted, BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest digit 0..3 for which `reach` of edge + digit * step is `wanted` or more; both are u32."""
    first, second, third = (tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64))
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < VOCAB, other=0)
        size, counted = weight.to(tl.uint32, bitcast=True), weight if BY_MASS else 1
        first += tl.where(size >= edge + step, counted, 0).to(tl.int64)
        second += tl.where(size >= edge + 2 * step, counted, 0).to(tl.int64)
        third += tl.where(size >= edge + 3 * step, counted, 0).to(tl.int64)
    enough = (tl.sum(first, axis=0) >= wanted).to(tl.uint32) + (tl.sum(second, axis=0) >= wanted).to(tl.uint32)
    return enough + (tl.sum(third, axis=0) >= wanted).to(tl.uint32)


@triton.jit
def edge_of(weights, wanted, BY_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight that together with all above it reaches `wanted` (1 or more); 0 where none does."""
    edge, step = tl.full((), 0, tl.uint32), tl.full((), LARGEST, tl.uint32)
    while step > 0:
        edge += digit_of(weights, edge, step, wanted, BY_MASS, VOCAB, BLOCK) * step
        step = step >> 2
    return edge.to(tl.int32, bitcast=True)


@triton.jit
def drop(weights, edge, ties, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Makes 0 of all weights but those above `edge` and the first `ties` of it, and of those below `least`; returns the
    sum that is left.
    """
    total, seen = ties * 0, ties * 0
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < VOCAB, other=0)
        tie = (weight == edge).to(tl.int64)
        kept = (weight > edge) | ((weight == edge) & (seen + tl.cumsum(tie, axis=0) <= ties))
        weight = tl.where(kept & (weight >= least), weight, 0)
        tl.store(weights + ids, weight, mask=ids < VOCAB)
        total += tl.sum(weight.to(tl.int64), axis=0)
        seen += tl.sum(tie, axis=0)
    tl.debug_barrier()
    return total


@triton.jit
def look_up(weights, target, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The first id at which the running sum is above `target`."""
    running = target * 0
    found = tl.full((), VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < VOCAB, other=0).to(tl.int64)
        ends = running + tl.cumsum(weight, axis=0)
        found = tl.minimum(found, tl.min(tl.where(ends > target, ids, VOCAB), axis=0))
        running += tl.sum(weight, axis=0)
    return found


@triton.jit
def draw(x, weights, params, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One token at a temperature above zero; see `sample` for `params`."""
    mass = weigh(x, weights, top, temperature, VOCAB, BLOCK)
    top_p = tl.load(params + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(params + 3)
    least = tl.load(params + 4)
    edge = tl.full((), 0, tl.int32)
    room = mass * 0 + VOCAB
    if (top_k > 0) & (top_k < VOCAB):
        edge = edge_of(weights, top_k.to(tl.int64), False, VOCAB, BLOCK)
        room = top_k - reach(weights, edge + 1, False, VOCAB, BLOCK)
        mass = reach(weights, edge + 1, True, VOCAB, BLOCK) + room * edge
    if top_p < 1.0:
        wanted = tl.maximum(tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
        found = edge_of(weights, wanted, True, VOCAB, BLOCK)
        missing = wanted - reach(weights, found + 1, True, VOCAB, BLOCK)
        ties = (missing + found - 1) // found
        room = tl.where(found == edge, tl.minimum(room, ties), ties)
        edge = found
    total = drop(weights, edge, room, least, VOCAB, BLOCK)
    counter = tl.load(params + 7).to(tl.uint32, bitcast=True)
    none = counter & 0
    low_key, high_key = tl.load(params + 5).to(tl.uint32, bitcast=True), tl.load(params + 6).to(tl.uint32, bitcast=True)
    low, high, _, _ = philox_impl(counter, none, none, none, low_key, high_key)
    bits = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    target = tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
    return look_up(weights, target, VOCAB, BLOCK)


@triton.jit
def sample(logits, weights, sampler_params, tokens, FIELDS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """logits f32[S, VOCAB] -> tokens i32[S], -1 for a row with NaN or +inf, or of -inf alone. `weights` i32[S, VOCAB]:
    scratch. `sampler_params` i32[S, FIELDS], see artifacts/sampler_params.py; rows that are not `on_gpu` stay out.
    """
    row = tl.program_id(0)
    params = sampler_params + row * FIELDS
    if tl.load(params) != 0:
        x = logits + row.to(tl.int64) * VOCAB
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        places = tl.full([BLOCK], VOCAB, tl.int32)
        unordered = tl.zeros([BLOCK], tl.int32)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.load(x + ids, mask=ids < VOCAB, other=float("-inf"))
            unordered |= (value != value).to(tl.int32)
            places = tl.where(value > best, ids, places)
            best = tl.where(value > best, value, best)
        top = tl.max(best, axis=0)
        token = tl.min(tl.where(best == top, places, VOCAB), axis=0)
        usable = (tl.max(unordered, axis=0) == 0) & (top != float("inf")) & (top != float("-inf"))
        temperature = tl.load(params + 1).to(tl.float32, bitcast=True)
        if usable & (temperature >= GREEDY_BELOW):
            token = draw(x, weights + row.to(tl.int64) * VOCAB, params, top, temperature, VOCAB, BLOCK)
        tl.store(tokens + row, tl.where(usable, token, -1))
