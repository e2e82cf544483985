"""reduce in Triton: a row a program. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def reduce(x, y, x_stride, y_stride, KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The "mean", "sum" or "max" of each row of x [rows, WIDTH] -> y, a number a row. The largest of a row with a
    NaN is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "max":
        largest = tl.max(tl.where(inside & (value == value), value, float("-inf")), axis=0)
        result = tl.where(tl.sum((value != value).to(tl.int32), axis=0) > 0, float("nan"), largest)
    else:
        result = tl.sum(value, axis=0)
        if KIND == "mean":
            result = result / WIDTH
    tl.store(y + row * y_stride, result.to(y.dtype.element_ty))
