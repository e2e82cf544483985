"""rms_norm in Triton: one program a row, the row in registers. Must not know: builder, runtime."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    weight,
    residual,
    total,
    y,
    x_stride,
    residual_stride,
    total_stride,
    y_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [rows, WIDTH], weight [WIDTH] -> y; with `residual` (or None) total = x + residual is normed and stored."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * total_stride + columns, value.to(total.dtype.element_ty), mask=inside)
    mean = tl.sum(value * value, axis=0) / WIDTH
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = value / tl.sqrt_rn(mean + eps) * scale
    tl.store(y + row * y_stride + columns, normed.to(y.dtype.element_ty), mask=inside)
