"""The elementwise functions of functions.py in Triton, blocks of f32 to blocks of f32; generated kernels call them.
Imported by the compiler and the interpreter alone.

Errors against the truth, where the GPU's exp2, log, sin, cos and erf are within 2 units in the last place (CUDA C++
Programming Guide, appendix on mathematical functions): exp, expm1, log1p, sigmoid, silu and tanh within 6 units; gelu
and gelu_tanh within 1.2e-7 |x|; pow, which is computed in f64, within 1. Numbers below 2^-126 count as zero.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def number(x, value):
    """A block like x that holds `value` everywhere."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def sub(a, b):
    return a - b


@triton.jit
def mul(a, b):
    return a * b


@triton.jit
def div(a, b):
    return tl.div_rn(a, b)


@triton.jit
def neg(x):
    return -x


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def square(x):
    return x * x


@triton.jit
def cube(x):
    return x * x * x


@triton.jit
def reciprocal(x):
    return tl.div_rn(number(x, 1.0), x)


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def rsqrt(x):
    root = tl.sqrt_rn(x)
    return tl.div_rn(number(x, 1.0), root)


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def floor(x):
    return tl.floor(x)


@triton.jit
def ceil(x):
    return tl.ceil(x)


@triton.jit
def round(x):
    """Halves to even. x is compared, and never added to: an x that is a product would become one with the addition, and
    what is rounded would be other than x. From 2^23 on, where floats are whole, `middle` is not between x and below.
    """
    below = tl.floor(x)
    middle, half = below + 0.5, below * 0.5
    odd = tl.floor(half) != half
    return tl.where((x > middle) | ((x == middle) & odd), below + 1.0, below)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def lt(a, b):
    return (a < b).to(tl.float32)


@triton.jit
def le(a, b):
    return (a <= b).to(tl.float32)


@triton.jit
def gt(a, b):
    return (a > b).to(tl.float32)


@triton.jit
def ge(a, b):
    return (a >= b).to(tl.float32)


@triton.jit
def eq(a, b):
    return (a == b).to(tl.float32)


@triton.jit
def ne(a, b):
    return (a != b).to(tl.float32)


@triton.jit
def where(condition, yes, no):
    return tl.where(condition != 0, yes, no)


@triton.jit
def logical_not(a):
    return (a == 0).to(tl.float32)


@triton.jit
def logical_and(a, b):
    return ((a != 0) & (b != 0)).to(tl.float32)


@triton.jit
def logical_or(a, b):
    return ((a != 0) | (b != 0)).to(tl.float32)


@triton.jit
def exp(x):
    """x = n ln 2 + r with r exact, ln 2 in two parts (Cody and Waite): exp2 of x / ln 2 would lose |x| units."""
    y = tl.clamp(x, -104.0, 89.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(y * LOG2_E + 0.5)
    r = tl.fma(n, number(x, -0.693359375), y)
    r = tl.fma(n, number(x, 2.12194440e-4), r)
    half = tl.floor(n * 0.5)  # in two steps: 2^128 is no float
    return tl.exp2(r * LOG2_E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def expm1(x):
    """By its series where the subtraction would cancel digits."""
    y = tl.where(tl.abs(x) < 0.5, x, 0.0)
    series = 1.0 / 40320.0 * y + 1.0 / 5040.0
    series = series * y + 1.0 / 720.0
    series = series * y + 1.0 / 120.0
    series = series * y + 1.0 / 24.0
    series = series * y + 1.0 / 6.0
    series = series * y + 0.5
    return tl.where(tl.abs(x) < 0.5, y + y * y * series, exp(x) - 1.0)


@triton.jit
def tanh(x):
    t = expm1(2.0 * tl.clamp(x, -10.0, 10.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.div_rn(t, t + 2.0)


@triton.jit
def sigmoid(x):
    return tl.div_rn(number(x, 1.0), 1.0 + exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def erf(x):
    return tl.erf(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def log1p(x):
    """log(u) of the rounded u = 1 + x, times what rounding lost (Kahan)."""
    u = 1.0 + x
    lost = tl.where((u == 1.0) | (u == float("inf")), 1.0, u - 1.0)
    return tl.where(u == 1.0, x, tl.log(u) * tl.where(u == float("inf"), 1.0, tl.div_rn(x, lost)))


@triton.jit
def sin(x):
    return tl.sin(x)


@triton.jit
def cos(x):
    return tl.cos(x)


@triton.jit
def pow(x, y):
    """A negative number has integer powers only; anything to the power of 0, and 1 to any power, is 1."""
    size = tl.exp(y.to(tl.float64) * tl.log(tl.abs(x).to(tl.float64))).to(tl.float32)
    whole = tl.floor(y) == y
    half = y * 0.5
    odd = whole & (tl.floor(half) != half)
    signed = tl.where(x < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    return tl.where((y == 0) | (x == 1.0), 1.0, signed)
