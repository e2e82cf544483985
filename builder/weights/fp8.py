"""Rounds float32 to E4M3, several times faster than a cast of numpy's. Comes in: values and scales. Goes out: E4M3.

Must not know: recipes, kernels. A float's sign, exponent and first three mantissa bits are twelve bits, and a table of
4096 entries gives the E4M3 byte of each; what is left to do is rounding to them.
"""

from __future__ import annotations

import numpy as np

from llmc.artifacts.types import FP8_MAX, NUMPY_DTYPES

_E4M3 = NUMPY_DTYPES["f8e4m3"]
_SMALLEST_NORMAL = np.float32(2.0**-6)
#: Adding and subtracting it leaves a multiple of 2^-9, what E4M3 has below its smallest normal number.
_MAGIC = np.float32(1.5 * 2**14)
#: Elements that are rounded at once: a few temporaries of them fit the L2 cache.
_CHUNK = 1 << 15

with np.errstate(over="ignore", invalid="ignore"):
    _BYTES = (np.arange(4096, dtype=np.uint32) << 20).view(np.float32).astype(_E4M3).view(np.uint8)


def quantize_fp8(value: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """E4M3 of value / scale: divided in float32, saturated at 448, rounded to nearest even. No value may be NaN.

    value [N, ...]; `scale` a number, or one for each of the N rows with axes of size 1 behind.
    """
    value = np.asarray(value, np.float32)
    scales = np.broadcast_to(np.asarray(scale, np.float32), (len(value), *(1,) * (value.ndim - 1)))
    out = np.empty(value.shape, np.uint8)
    step = max(_CHUNK * len(value) // max(value.size, 1), 1)
    for start in range(0, len(value), step):
        out[start : start + step] = _round(value[start : start + step] / scales[start : start + step])
    return out.view(_E4M3)


def _round(x: np.ndarray) -> np.ndarray:
    """The E4M3 bytes of a fresh array, which is overwritten."""
    np.clip(x, -FP8_MAX, FP8_MAX, out=x)
    small = np.abs(x) < _SMALLEST_NORMAL
    tiny = x + _MAGIC
    tiny -= _MAGIC
    np.copysign(tiny, x, out=tiny)  # -0 keeps its sign
    np.copyto(x, tiny, where=small)
    bits = x.view(np.uint32)
    odd = bits >> 20
    odd &= 1
    odd += 0x7FFFF
    bits += odd
    bits >>= 20
    return _BYTES[bits]
