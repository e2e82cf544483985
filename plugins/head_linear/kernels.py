"""A matrix product for each head, for NVIDIA GPUs. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl

from llmc.plugins.linear.kernels import place_of_tile, products


@triton.jit
def head_gemm(
    x,  # [M,H*S], rows x_stride apart, rounded to bf16 beside a bf16 weight
    w,  # [H,N,K]
    y,  # [M,H*N]
    M,
    N,
    K,
    x_stride,
    y_stride,
    x_head,  # S
    start,  # the first of the K columns of a head of x
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """A tile of one head's results; grid z counts heads. Sums run over k in ascending steps."""
    head = tl.program_id(2).to(tl.int64)
    row_tile, column_tile = place_of_tile()
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row, column = tl.minimum(rows, M - 1).to(tl.int64), tl.minimum(columns, N - 1)
    x_at = x + row[:, None] * x_stride + (head * x_head + start) + depth[None, :]
    w_at = w + (head * N + column)[None, :] * K + depth[:, None]
    total, _ = products(x_at, w_at, w_at, K, ROWS, COLUMNS, DEPTH, EVEN_K, False, 0)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    y_at = y + row[:, None] * y_stride + (head * N + columns)[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=inside)
