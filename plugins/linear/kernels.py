"""Tiled matrix products for NVIDIA GPUs: y = epilogue(x times the rows of w).

Comes in: pointers, strides in elements, sizes; the blocking as constants. Goes out: a tile of y for each program. Sums
run over k in ascending steps of DEPTH, in f32 (INT8: in i32), and are never split, so that a row's result does not
depend on how many rows there are. Imported by the compiler and the interpreter alone.
"""

import triton
import triton.language as tl

#: Numbers of an INT4 weight that share a scale and a zero point.
GROUP: tl.constexpr = tl.constexpr(128)
#: Neighbouring tiles of columns that run one after the other over all rows: their weights stay in the L2 cache.
BAND: tl.constexpr = tl.constexpr(8)


@triton.jit
def activate(value, NAME: tl.constexpr):
    """An activation of f32 numbers, by its name in the graph."""
    if NAME == "relu":
        value = tl.maximum(value, 0.0)
    elif NAME == "silu":
        value = value * tl.sigmoid(value)
    elif NAME == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    return value


@triton.jit
def place_of_tile():
    """Row and column of this program's tile, in tiles: down all rows within a band of columns, then the next band."""
    rows, columns = tl.num_programs(0), tl.num_programs(1)
    number = tl.program_id(1) * rows + tl.program_id(0)
    band = number // (rows * BAND)
    width = tl.minimum(columns - band * BAND, BAND)
    within = number - band * rows * BAND
    return within // width, band * BAND + within % width


@triton.jit
def multiply(a, b, total, IMPRECISE: tl.constexpr):
    """Total + a times b. Some tensor cores sum FP8 in less than f32: after IMPRECISE products that is promoted."""
    if a.dtype == tl.float32:
        total = tl.dot(a, b, total, input_precision="ieee")
    elif IMPRECISE > 0:
        total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
    elif a.dtype == tl.int8:
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def load_block(at, depth, left, EVEN_K: tl.constexpr, INNER: tl.constexpr):
    """A block whose numbers along k are `depth`, as INNER; those from `left` on are zero."""
    block = tl.load(at) if EVEN_K else tl.load(at, mask=depth < left, other=0.0)
    if block.dtype == tl.float8e4nv and tl.bfloat16 == INNER:
        block = block.to(tl.float32)  # before sm_90 no instruction makes bf16 of what E4M3 becomes
    return block.to(INNER)


@triton.jit
def scaled(total, row, column, x_scale, x_scale_stride, w_scale, bias):
    """Sums in f32, times the scales of their rows and columns, plus the bias; each only where there is one."""
    value = total.to(tl.float32)
    if w_scale is not None:
        value = value * tl.load(w_scale + column)[None, :]
    if x_scale is not None:
        value = value * tl.load(x_scale + row * x_scale_stride)[:, None]
    if bias is not None:
        value = value + tl.load(bias + column)[None, :].to(tl.float32)
    return value


@triton.jit
def products(
    x_at,  # pointers to x's first block, [ROWS,DEPTH]
    w_at,  # to the first block of w's rows, [DEPTH,COLUMNS]
    up_at,  # to that of the rows of up with GATED
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of DEPTH
    GATED: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Sums over k of x times w, and of x times up: f32[ROWS,COLUMNS], or i32 of INT8."""
    SUM: tl.constexpr = tl.int32 if x_at.dtype.element_ty == tl.int8 else tl.float32
    INNER: tl.constexpr = w_at.dtype.element_ty if w_at.dtype == x_at.dtype else tl.bfloat16
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], SUM)
    up_total = tl.zeros([ROWS, COLUMNS], SUM)
    for k in range(0, K, DEPTH):
        a = load_block(x_at, depth[None, :], K - k, EVEN_K, INNER)
        total = multiply(a, load_block(w_at, depth[:, None], K - k, EVEN_K, INNER), total, IMPRECISE)
        if GATED:
            b = load_block(up_at, depth[:, None], K - k, EVEN_K, INNER)
            up_total = multiply(a, b, up_total, IMPRECISE)
        x_at += DEPTH
        w_at += DEPTH
        up_at += DEPTH
    return total, up_total


@triton.jit
def gemm(
    x,  # [M,K], rows x_stride apart: f32 and bf16 are rounded to bf16 beside a bf16 or FP8 weight
    x_scale,  # f32[M,1] of an FP8 or INT8 x, or None
    w,  # [N,K], or [2*N,K] with GATED: rows of gate, then of up
    w_scale,  # f32 of each row of w, or None
    bias,  # f32 of each row of w, or None
    y,  # [M,N]
    M,
    N,
    K,
    x_stride,
    x_scale_stride,
    y_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """A tile of ROWS by COLUMNS results, in steps of DEPTH; rows and columns beyond the last repeat it."""
    row_tile, column_tile = place_of_tile()
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row, column = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(columns, N - 1).to(tl.int64)
    x_at = x + row[:, None] * x_stride + depth[None, :]
    w_at = w + column[None, :] * K + depth[:, None]
    up_at = w_at + N.to(tl.int64) * K
    total, up_total = products(x_at, w_at, up_at, K, ROWS, COLUMNS, DEPTH, EVEN_K, GATED, IMPRECISE)
    value = activate(scaled(total, row, column, x_scale, x_scale_stride, w_scale, bias), ACTIVATION)
    if GATED:
        value = value * scaled(up_total, row, column + N, x_scale, x_scale_stride, w_scale, bias)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y + row[:, None] * y_stride + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def int4_group(w, zero, column, group, START: tl.constexpr, row_bytes, zero_bytes):
    """Numbers minus zero point of a group of GROUP columns, as bf16[columns of the tile, GROUP]: exact. What lies
    beside the matrix is anything, and meets zeros of x. Two numbers lie in a byte, the even one low.
    """
    zeros = (tl.load(zero + column * zero_bytes + group // 2).to(tl.int32) >> ((group % 2) * 4)) & 15
    if START % 2 == 0:
        byte = group * (GROUP // 2) - START // 2 + tl.arange(0, GROUP // 2)
    else:
        byte = (group * GROUP - START + tl.arange(0, GROUP)) // 2
    inside = byte < row_bytes if START == 0 else (byte >= 0) & (byte < row_bytes)
    pair = tl.load(w + column[:, None] * row_bytes + byte[None, :], mask=inside[None, :], other=0)
    if START % 2 == 0:
        numbers = tl.interleave(pair & 15, pair >> 4)
    else:
        odd = (group * GROUP - START + tl.arange(0, GROUP)) % 2
        numbers = (pair >> (odd * 4).to(tl.uint8)[None, :]) & 15
    return (numbers.to(tl.int8) - zeros.to(tl.int8)[:, None]).to(tl.bfloat16)


@triton.jit
def products_int4(
    x_row,  # pointers to x's rows, [ROWS]
    w,
    w_scale,
    zero,
    column,  # rows of w, [COLUMNS]
    K,
    N,  # from a row of w to its row of up with GATED
    groups,
    row_bytes,  # of w
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,  # columns of the first group that lie before this matrix
    GATED: tl.constexpr,
):
    """As `products`, of INT4 weights: the products of a group are summed, scaled, and added to the groups before."""
    zero_bytes = (groups + 1) // 2
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(0, groups):
        k = group * GROUP - START + tl.arange(0, GROUP)
        a = tl.load(x_row[:, None] + k[None, :], mask=((k >= 0) & (k < K))[None, :], other=0).to(tl.bfloat16)
        b = int4_group(w, zero, column, group, START, row_bytes, zero_bytes)
        total += tl.dot(a, tl.trans(b)) * tl.load(w_scale + column * groups + group).to(tl.float32)[None, :]
        if GATED:
            b = int4_group(w, zero, column + N, group, START, row_bytes, zero_bytes)
            scale = tl.load(w_scale + (column + N) * groups + group).to(tl.float32)
            up_total += tl.dot(a, tl.trans(b)) * scale[None, :]
    return total, up_total


@triton.jit
def gemm_int4(
    x,  # [M,K], rounded to bf16
    w,  # u4[N,K] or [2*N,K] with GATED; rows begin with a byte
    w_scale,  # f16[.., G] of each group of 128 columns
    zero,  # u4[.., G], rows begin with a byte
    bias,
    y,
    M,
    N,
    K,
    groups,
    row_bytes,
    x_stride,
    y_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """As `gemm`, of INT4 weights."""
    row_tile, column_tile = place_of_tile()
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row, column = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(columns, N - 1).to(tl.int64)
    x_row = x + row * x_stride
    total, up_total = products_int4(
        x_row, w, w_scale, zero, column, K, N, groups, row_bytes, ROWS, COLUMNS, START, GATED
    )
    value = activate(scaled(total, row, column, None, 0, None, bias), ACTIVATION)
    if GATED:
        value = value * scaled(up_total, row, column + N, None, 0, None, bias)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y + row[:, None] * y_stride + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def quantize_int8(x, factors, y, scale, K, x_stride, STATIC: tl.constexpr, BLOCK: tl.constexpr):
    """A row of x, times `factors`, as INT8: y i8[M,K] side by side, its scale f32[M]. Without STATIC the scale is the
    largest magnitude / 127, or 1; it is NaN where the row is not finite. Rounded to the nearest, halves to even.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        value = _times(x + row * x_stride, factors, k + block, K)
        largest = tl.maximum(largest, tl.where(value == value, tl.abs(value), float("inf")))
    amax = tl.max(largest, 0)
    used = tl.math.div_rn(amax, 127.0)
    if STATIC is not None:
        used = tl.full([], STATIC, tl.float32)
    used = tl.where(used > 0, used, 1.0)
    tl.store(scale + row, tl.where(amax < float("inf"), used, float("nan")))
    for k in range(0, K, BLOCK):
        value = tl.math.div_rn(_times(x + row * x_stride, factors, k + block, K), tl.full([BLOCK], used, tl.float32))
        value = tl.minimum(tl.maximum(tl.where(value == value, value, 0.0), -127.0), 127.0)
        rounded = (value + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is below one is rounded away
        tl.store(y + row * K + k + block, rounded.to(tl.int8), mask=k + block < K)


@triton.jit
def _times(x, factors, k, K):
    value = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
    if factors is not None:
        value = value * tl.load(factors + k, mask=k < K, other=0)
    return value
