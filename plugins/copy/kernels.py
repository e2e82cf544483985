"""copy in Triton: elements from one place to another. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def move(
    x,
    y,
    x0,
    x1,
    x2,
    x3,
    y0,
    y1,
    y2,
    x_first,
    y_first,
    ROWS1: tl.constexpr,
    ROWS2: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[a, b, c, d] = x[a, b, c, d] for four axes, the last three ROWS1, ROWS2 and WIDTH long; program (a, b and c as
    one number, piece of BLOCK columns). x0 ... y2: elements from one entry of an axis to the next; y's last is dense.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    a, b, c = row // (ROWS1 * ROWS2), row // ROWS2 % ROWS1, row % ROWS2
    value = tl.load(x + x_first + a * x0 + b * x1 + c * x2 + columns * x3, mask=inside)
    tl.store(y + y_first + a * y0 + b * y1 + c * y2 + columns, value.to(y.dtype.element_ty), mask=inside)
