"""The steps of row programs in Triton, beside the elementwise functions of pointwise; generated kernels call them.

Values lie in memory, as flat rows of f32: what a step wrote the next ones read after a barrier, by index arithmetic, so
that rows of any size can be sliced, joined and gathered. Imported by the compiler and the interpreter alone.
"""

import triton
import triton.language as tl

LEAST_I32 = tl.constexpr(-(2**31))
MOST_I32 = tl.constexpr(2**31 - 1)


@triton.jit
def as_i32(x):
    """Towards zero."""
    return x.to(tl.int32).to(tl.float32)


@triton.jit
def as_bool(x):
    """1 for what is not 0."""
    return (x != 0).to(tl.float32)


@triton.jit
def as_f32(x):
    """As it is: all numbers are f32 here."""
    return x


@triton.jit
def grid_of(ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Row and column of each place of a block, and whether it is one of ROWS x COLUMNS."""
    row, column = tl.arange(0, ROW_BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    return row, column, (row < ROWS) & (column < COLUMNS)


@triton.jit
def reduce(
    x, y, KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """The "mean", "sum" or "max" of each of ROWS rows; NaN is larger than everything."""
    row, column, inside = grid_of(ROWS, WIDTH, ROW_BLOCK, BLOCK)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "max":
        largest = tl.max(tl.where(inside & (value == value), value, float("-inf")), axis=1)
        result = tl.where(tl.sum((value != value).to(tl.int32), axis=1) > 0, float("nan"), largest)
    else:
        result = tl.sum(value, axis=1)
        if KIND == "mean":
            result = result / WIDTH
    at = tl.arange(0, ROW_BLOCK)
    tl.store(y + at, result, mask=at < ROWS)


@triton.jit
def topk(
    x,
    y,
    K: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the K largest (smallest) of each row stand, best first, of equals the first. NaN is larger than everything.

    Floats become integers of the same order, so that the best is a maximum and no number is beyond it.
    """
    row, column, inside = grid_of(ROWS, WIDTH, ROW_BLOCK, BLOCK)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32) + 0.0  # -0 is 0
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ MOST_I32, bits)
    key = tl.where(value != value, MOST_I32, key)
    if not LARGEST:
        key = -1 - key
    left = inside
    at = tl.arange(0, ROW_BLOCK)
    for i in range(K):
        best = tl.max(tl.where(left, key, LEAST_I32), axis=1)[:, None]
        first = tl.min(tl.where(left & (key == best), column, BLOCK), axis=1)
        tl.store(y + at * K + i, first.to(tl.float32), mask=at < ROWS)
        left = left & (column != first[:, None])


@triton.jit
def gather(
    x,
    index,
    y,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[r, i] = x[r, index[r, i]]."""
    row, column, inside = grid_of(ROWS, COUNT, ROW_BLOCK, BLOCK)
    chosen = tl.load(index + row * COUNT + column, mask=inside, other=0).to(tl.int32)
    value = tl.load(x + row * WIDTH + chosen, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * COUNT + column, value, mask=inside)


@triton.jit
def scatter(
    x,
    index,
    source,
    y,
    NUMBER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = x, but y[r, index[r, i]] = source[r, i], or NUMBER where `source` is None. Of equal indices the last
    counts.
    """
    row, column, inside = grid_of(ROWS, WIDTH, ROW_BLOCK, BLOCK)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    there = tl.arange(0, ROW_BLOCK)[:, None] < ROWS
    for i in range(COUNT):
        chosen = tl.load(index + row * COUNT + i, mask=there, other=-1).to(tl.int32)
        if source is None:
            fresh = tl.full([ROW_BLOCK, 1], NUMBER, tl.float32)
        else:
            fresh = tl.load(source + row * COUNT + i, mask=there, other=0.0).to(tl.float32)
        value = tl.where(column == chosen, fresh, value)
    tl.store(y + row * WIDTH + column, value, mask=inside)


@triton.jit
def place(
    x,
    y,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    X_ROW: tl.constexpr,
    X_FIRST: tl.constexpr,
    X_STEP: tl.constexpr,
    Y_ROW: tl.constexpr,
    Y_FIRST: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS times WIDTH groups of INNER numbers from x, X_STEP numbers apart, to y, where they lie side by side."""
    row, column, inside = grid_of(ROWS, WIDTH * INNER, ROW_BLOCK, BLOCK)
    source = row * X_ROW + X_FIRST + column // INNER * X_STEP + column % INNER
    value = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * Y_ROW + Y_FIRST + column, value, mask=inside)
