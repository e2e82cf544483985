"""Rounding rows to FP8 E4M3 in Triton, a program a row. Imported by the compiler and the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def quantize_e4m3(x, y, scale, K, x_stride, y_stride, scale_stride, STATIC: tl.constexpr, BLOCK: tl.constexpr):
    """x [M,K] -> y E4M3 of x / scale, saturated at 448; scale f32[M,1] is STATIC, or the row's largest magnitude / 448
    (of a row of zeros 1).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    if STATIC is None:
        largest = tl.zeros([BLOCK], tl.float32)
        for k in range(0, K, BLOCK):
            value = tl.load(x + row * x_stride + k + block, mask=k + block < K, other=0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        amax = tl.max(largest, 0)
        used = tl.where(amax == 0, 1.0, tl.math.div_rn(amax, tl.full([], 448.0, tl.float32)))
    else:
        used = tl.full([], STATIC, tl.float32)
    tl.store(scale + row * scale_stride, used)
    for k in range(0, K, BLOCK):
        value = tl.load(x + row * x_stride + k + block, mask=k + block < K, other=0).to(tl.float32)
        value = tl.math.div_rn(value, tl.full([BLOCK], used, tl.float32))
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + row * y_stride + k + block, value.to(y.dtype.element_ty), mask=k + block < K)
