"""Rounds float32 to INT8 with one scale a row: q * scale, q from -127 to 127.

Comes in: matrices, or stacks of them. Goes out: scales, INT8 numbers. Must not know: recipes, kernels. Nothing is
searched for: a row's largest magnitude becomes 127.
"""

from __future__ import annotations

import numpy as np

from llmc.artifacts.types import INT8_MAX


def int8_scale(value: np.ndarray) -> np.ndarray:
    """f32[..., N] of value f32[..., N, K]; 1 for a row whose largest magnitude / 127 is no float above zero."""
    scale = (np.abs(value).max(axis=-1) / np.float32(INT8_MAX)).astype(np.float32)
    return np.where(scale > 0, scale, np.float32(1))


def quantize_int8(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """i8[..., N, K] of value f32[..., N, K] with scales f32[..., N]: rounded to nearest even, saturated."""
    steps = np.rint(value / scale[..., None])
    return np.clip(steps, -INT8_MAX, INT8_MAX, out=steps).astype(np.int8)
