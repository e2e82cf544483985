"""Rounding rows to FP8 E4M3 in Triton, a program a row. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def row_scale(amax, STATIC: tl.constexpr):
    """STATIC, or the scale of a row whose largest magnitude is `amax`."""
    if STATIC is None:
        used = tl.where(amax == 0, 1.0, tl.math.div_rn(amax, tl.full([], 448.0, tl.float32)))
    else:
        used = tl.full([], STATIC, tl.float32)
    return used


@triton.jit
def as_e4m3(value, scale):
    """value / scale, saturated at 448."""
    value = tl.math.div_rn(value, tl.full(value.shape, scale, tl.float32))
    return tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_e4m3(x, y, scale, K, x_stride, y_stride, scale_stride, STATIC: tl.constexpr, BLOCK: tl.constexpr):
    """x [M,K] -> y E4M3 of x / scale, saturated at 448; scale f32[M,1] is STATIC, or the row's largest magnitude / 448
    (of a row of zeros 1).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    if STATIC is None:
        for k in range(0, K, BLOCK):
            value = tl.load(x + row * x_stride + k + block, mask=k + block < K, other=0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
    used = row_scale(tl.max(largest, 0), STATIC)
    tl.store(scale + row * scale_stride, used)
    for k in range(0, K, BLOCK):
        value = tl.load(x + row * x_stride + k + block, mask=k + block < K, other=0).to(tl.float32)
        tl.store(y + row * y_stride + k + block, as_e4m3(value, used).to(y.dtype.element_ty), mask=k + block < K)
