"""Rows of a table in Triton, a program a row. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def embedding(ids, table, y, rows, y_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Ids i32[M], table [rows,WIDTH] -> y [M,WIDTH]. A padded row's id is anything: what is no row is left out."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    name = tl.load(ids + row).to(tl.int64)
    inside = (columns < WIDTH) & (name >= 0) & (name < rows)
    value = tl.load(table + name * WIDTH + columns, mask=inside, other=0.0)
    tl.store(y + row * y_stride + columns, value.to(y.dtype.element_ty), mask=inside)
