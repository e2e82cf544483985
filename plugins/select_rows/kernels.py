"""select_rows in Triton. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def select_rows(x, rows, y, x_stride, y_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Row rows[s] of x [T, WIDTH] -> row s of y; program (s, piece of BLOCK columns). A row below 0 is none."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64)
    inside = (columns < WIDTH) & (source >= 0)
    value = tl.load(x + source * x_stride + columns, mask=inside)
    tl.store(y + row * y_stride + columns, value.to(y.dtype.element_ty), mask=inside)
