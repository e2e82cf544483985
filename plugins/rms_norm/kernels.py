"""rms_norm in Triton: one program a row, the row in registers. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl

from llmc.plugins.quantize.kernels import as_e4m3, row_scale


@triton.jit
def rms_norm(
    x,
    weight,
    residual,
    total,
    y,
    scales,
    x_stride,
    residual_stride,
    total_stride,
    y_stride,
    scales_stride,
    eps,
    STATIC: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [rows, WIDTH], weight [WIDTH] -> y; with `residual` (or None) total = x + residual is normed and stored. With
    `scales` (or None) y is E4M3, each row by STATIC or, if that is None, by its largest magnitude.
    """
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
    if scales is not None:
        used = row_scale(tl.max(tl.where(inside, tl.abs(normed), 0.0), axis=0), STATIC)
        tl.store(scales + row * scales_stride, used)
        normed = as_e4m3(normed, used)
    tl.store(y + row * y_stride + columns, normed.to(y.dtype.element_ty), mask=inside)
