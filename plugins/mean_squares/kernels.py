"""mean_squares in Triton: a row a program. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def mean_squares(x, y, x_stride, y_stride, total, COLUMN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The squares of x [T, WIDTH], summed by rows and divided by `total` -> column COLUMN of y."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / total
    tl.store(y + row * y_stride + COLUMN, mean.to(y.dtype.element_ty))
