"""Matrix products of tokens with the experts that they were routed to, for NVIDIA GPUs: lists of each expert's rows,
tiles of those lists, the weighted sums. Imported by the compiler and the interpreter alone.
"""

import triton
import triton.language as tl

from llmc.plugins.linear.kernels import products, products_int4, scaled


@triton.jit
def route(index, index_stride, counts, order, T, E, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Index i32[T,SLOTS] -> counts i32[E] and order i32[T*SLOTS]: the rows (token * SLOTS + slot) of expert 0 in
    ascending order, then those of expert 1, and so on. A program for each expert; rows of none are left out.
    """
    expert = tl.program_id(0)
    total = T * SLOTS
    block = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for first in range(0, total, BLOCK):
        given = _experts(index, index_stride, first + block, total, SLOTS)
        lower += ((given >= 0) & (given < expert)).to(tl.int32)
        own += (given == expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(counts + expert, tl.sum(own, 0))
    for first in range(0, total, BLOCK):
        mine = (_experts(index, index_stride, first + block, total, SLOTS) == expert).to(tl.int32)
        at = place + tl.cumsum(mine, 0) - 1
        tl.store(order + at, first + block, mask=mine != 0)
        place += tl.sum(mine, 0)


@triton.jit
def _experts(index, index_stride, row, total, SLOTS: tl.constexpr):
    """The experts of rows; -1 beyond the last."""
    at = (row // SLOTS).to(tl.int64) * index_stride + row % SLOTS
    return tl.load(index + at, mask=row < total, other=-1)


@triton.jit
def rows_of_tile(counts, order, E, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """This program's expert, the rows of its tile, and which of these there are. Tiles count through all experts; those
    behind the last have no rows, and expert 0. EXPERTS: a power of two from E on.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, mask=experts < E, other=0)
    tiles = (count + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, 0) <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    inside = first < tl.sum(tl.where(experts == expert, count, 0), 0)
    row = tl.load(order + tl.sum(tl.where(before, count, 0), 0) + first, mask=inside, other=0)
    return tl.where(expert < E, expert, 0).to(tl.int64), row.to(tl.int64), inside


@triton.jit
def expert_products(
    x,  # [T,K], rows x_stride apart, or [T,SLOTS,K] with a row for each expert: see linear's gemm
    x_scale,  # f32 of each row of an FP8 x, or None
    w,  # [E,N,K], or [E,2*N,K] with GATED: rows of gate, then of up; or u4
    w_scale,  # f32[E,..], of u4 f16[E,..,G], or None
    zero,  # of u4 [E,..,G], or None
    bias,  # f32[E,..], or None
    expert,
    row,
    column,
    N,
    K,
    groups,
    row_bytes,
    x_stride,
    x_scale_stride,
    SLOTS: tl.constexpr,
    ONE_ROW: tl.constexpr,  # x has one row a token
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_K: tl.constexpr,
    START: tl.constexpr,
    GATED: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """Results of a tile before the formula: of gate and up with GATED, else of w, twice."""
    x_row = row // SLOTS if ONE_ROW else row
    w_row = expert * (N * 2 if GATED else N) + column
    if zero is not None:
        x_at = x + x_row * x_stride
        total, up = products_int4(x_at, w, w_scale, zero, w_row, K, N, groups, row_bytes, ROWS, COLUMNS, START, GATED)
        scale = None
    else:
        depth = tl.arange(0, DEPTH)
        x_at = x + x_row[:, None] * x_stride + depth[None, :]
        w_at = w + w_row[None, :] * K + depth[:, None]
        up_at = w_at + N.to(tl.int64) * K
        total, up = products(x_at, w_at, up_at, K, ROWS, COLUMNS, DEPTH, EVEN_K, GATED, IMPRECISE)
        scale = w_scale
    left = scaled(total, x_row, w_row, x_scale, x_scale_stride, scale, bias)
    right = scaled(up, x_row, w_row + N, x_scale, x_scale_stride, scale, bias) if GATED else left
    return left, right


@triton.jit
def combine(
    parts,  # f32[T,SLOTS,N]
    index,  # i32[T,SLOTS]
    weights,  # f32[T,SLOTS]
    y,  # [T,N]
    N,
    E,
    index_stride,
    weights_stride,
    y_stride,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two from SLOTS on
    BLOCK: tl.constexpr,
):
    """The sum of a token's parts times their weights, by ascending expert. What is no expert counts as the last."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, PADDED)
    given = tl.load(index + token * index_stride + slots, mask=slots < SLOTS, other=0)
    key = tl.where((given >= 0) & (given < E), given, E) * SLOTS + slots
    key = tl.where(slots < SLOTS, key, (E + 1) * SLOTS)
    total = tl.zeros([BLOCK], tl.float32)
    done = -1
    for _ in range(SLOTS):
        done = tl.min(tl.where(key > done, key, (E + 1) * SLOTS), 0)
        slot = done % SLOTS
        part = tl.load(parts + (token * SLOTS + slot) * N + columns, mask=columns < N, other=0)
        total += part * tl.load(weights + token * weights_stride + slot)
    tl.store(y + token * y_stride + columns, total.to(y.dtype.element_ty), mask=columns < N)
