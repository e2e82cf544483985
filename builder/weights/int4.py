"""Rounds float32 to INT4 in groups of 128 columns: (q - zero) * scale, q and zero from 0 to 15, scale f16.

Comes in: matrices, or stacks of them. Goes out: scales, zero points, 4-bit numbers. Must not know: recipes, kernels.
Nothing is searched for: a group's range, widened to hold 0, is divided into 15 steps. The last group of a row may be
smaller.
"""

from __future__ import annotations

import numpy as np

from llmc.artifacts.types import INT4_GROUP, INT4_MAX, NUMPY_DTYPES

_U4 = NUMPY_DTYPES["u4"]
_F16_MAX = np.float32(65504)


def group_starts(columns: int) -> np.ndarray:
    """The first column of each group."""
    return np.arange(0, columns, INT4_GROUP)


def int4_scale(value: np.ndarray) -> np.ndarray:
    """f16[...,N,G] of value f32[...,N,K]; 1 for a group whose range is no f16 number above zero."""
    low, high = _range(value)
    scale = np.minimum((high - low) / np.float32(INT4_MAX), _F16_MAX).astype(np.float16)
    return np.where(scale > 0, scale, np.float16(1))


def int4_zero(value: np.ndarray) -> np.ndarray:
    """u4[...,N,G]: the number that stands for 0 in each group of value f32[...,N,K]."""
    low, _ = _range(value)
    return np.clip(np.rint(-low / int4_scale(value).astype(np.float32)), 0, INT4_MAX).astype(np.uint8).astype(_U4)


def quantize_int4(value: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """u4[...,N,K] of value f32[...,N,K] with scales [...,N,G] and zero points [...,N,G]: rounded to nearest even,
    saturated.
    """
    group = np.arange(value.shape[-1]) // INT4_GROUP
    steps = np.rint(value / scale.astype(np.float32)[..., group])
    steps += zero.astype(np.float32)[..., group]
    return np.clip(steps, 0, INT4_MAX, out=steps).astype(np.uint8).astype(_U4)


def _range(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and largest number of each group and 0."""
    starts = group_starts(value.shape[-1])
    low, high = (f.reduceat(value, starts, axis=-1) for f in (np.minimum, np.maximum))
    return np.minimum(low, 0), np.maximum(high, 0)
