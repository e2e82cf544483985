"""The layouts in which kernels read weights: panels of outputs, side by side for every k; 4-bit numbers two in a byte.

plugins/linear/formats.h is the other side of the panels. Comes in: a matrix or vector by outputs. Goes out: the same,
packed. Must not know: recipes, where weights come from.
"""

from __future__ import annotations

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES

#: FP8: bytes that a kernel decodes together, and their order: byte 4*i+j of a group is output 8*j+i.
_GROUP = np.arange(32).reshape(4, 8).T.ravel()
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def pack_panels(value: np.ndarray, width: int, *, gated: bool = False) -> np.ndarray:
    """[N, K] -> [panels, K, width] (or [N] -> [panels, width]): each panel holds `width` outputs for every k. A stack
    of matrices [E, N, K] -> [E, panels, K, width]. INT8 [N, K] -> [panels, K / 2, width * 2]: two k of an output lie
    side by side, a zero behind an odd K.

    N is padded with zeros. `gated`: the rows are N/2 gates, then N/2 ups; each panel holds width/2 gates, then the ups
    that belong to them, and both halves are padded alike. FP8 bytes are shuffled within groups of 32 outputs, so that a
    kernel decodes eight outputs that belong together from one 64-bit lane. 4-bit numbers become two in a byte of u8, so
    that a panel is [K, width / 2]: of 64 outputs, nibble j of 32-bit word i is output 8*j+i.
    """
    if value.ndim == 3:
        return np.stack([pack_panels(matrix, width, gated=gated) for matrix in value])
    rows, missing = _rows(len(value), width, gated)
    if value.dtype == NUMPY_DTYPES["u4"]:
        return _nibbles(np.where(missing[..., None], 0, value.view(np.uint8)[rows]))
    if value.dtype == NUMPY_DTYPES["i8"]:
        return _pairs(np.where(missing[..., None], 0, value[rows]))
    if value.dtype == NUMPY_DTYPES["f8e4m3"]:
        order = (np.arange(0, width, 32)[:, None] + _GROUP).ravel()
        rows, missing = rows[:, order], missing[:, order]
    bits = value.view(_INTEGERS[value.itemsize])  # numpy moves whole numbers faster than low-precision floats
    packed = bits[rows]
    packed[missing] = 0
    return np.ascontiguousarray(np.moveaxis(packed, 1, -1)).view(value.dtype)


def unpack_panels(packed: np.ndarray, shape: tuple[int, ...], *, gated: bool = False) -> np.ndarray:
    """What `pack_panels` was given: [N, K], [E, N, K] or [N], of which 4-bit numbers are packed as u8."""
    if len(shape) == 3:
        return np.stack([unpack_panels(panels, shape[1:], gated=gated) for panels in packed])
    if packed.dtype == np.uint8:
        return _by_rows(_unpacked_nibbles(packed), shape, gated).view(NUMPY_DTYPES["u4"])
    if packed.dtype == NUMPY_DTYPES["i8"]:
        return _by_rows(_unpacked_pairs(packed)[..., : shape[1]], shape, gated)
    width = packed.shape[-1]
    rows, missing = _rows(shape[0], width, gated)
    if packed.dtype == NUMPY_DTYPES["f8e4m3"]:
        order = (np.arange(0, width, 32)[:, None] + _GROUP).ravel()
        rows, missing = rows[:, order], missing[:, order]
    bits = np.moveaxis(packed.view(_INTEGERS[packed.itemsize]), -1, 1)
    value = np.empty(shape, bits.dtype)
    value[rows[~missing]] = bits[~missing]
    return value.view(packed.dtype)


def _rows(count: int, width: int, gated: bool) -> tuple[np.ndarray, np.ndarray]:
    """i64[panels, width]: which row stands where; bool of the same shape: where none does (the row is then 0)."""
    sides = 2 if gated else 1
    own, side_width = count // sides, width // sides
    panels = -(-own // side_width)
    place = np.arange(panels * side_width).reshape(panels, side_width)
    rows = np.concatenate([place + side * own for side in range(sides)], axis=1)
    missing = np.concatenate([place >= own] * sides, axis=1)
    return np.where(missing, 0, rows), missing


def _by_rows(panels: np.ndarray, shape: tuple[int, ...], gated: bool) -> np.ndarray:
    """[panels, width, K] -> [N, K]."""
    rows, missing = _rows(shape[0], panels.shape[1], gated)
    value = np.empty(shape, panels.dtype)
    value[rows[~missing]] = panels[~missing]
    return value


def _pairs(panels: np.ndarray) -> np.ndarray:
    """i8[panels, width, K] -> i8[panels, K / 2, width * 2]."""
    count, width, columns = panels.shape
    whole = np.pad(panels, ((0, 0), (0, 0), (0, columns % 2))).reshape(count, width, -1, 2)
    return np.ascontiguousarray(whole.swapaxes(1, 2)).reshape(count, -1, 2 * width)


def _unpacked_pairs(packed: np.ndarray) -> np.ndarray:
    """i8[panels, K / 2, width * 2] -> i8[panels, width, K], with the zero behind an odd K."""
    count, halves, both = packed.shape
    return packed.reshape(count, halves, both // 2, 2).swapaxes(1, 2).reshape(count, both // 2, 2 * halves)


def _nibbles(panels: np.ndarray) -> np.ndarray:
    """u8[panels, width, K] of numbers below 16 -> u8[panels, K, width / 2]."""
    count, width, columns = panels.shape
    # Axes: panel, group of 64 outputs, byte of a word, its low and its high nibble, word, k.
    parts = panels.reshape(count, width // 64, 4, 2, 8, columns)
    both = parts[:, :, :, 0] | parts[:, :, :, 1] << 4
    return np.ascontiguousarray(both.transpose(0, 4, 1, 3, 2)).reshape(count, columns, width // 2)


def _unpacked_nibbles(packed: np.ndarray) -> np.ndarray:
    """u8[panels, K, width / 2] -> u8[panels, width, K] of numbers below 16."""
    count, columns, half = packed.shape
    both = packed.reshape(count, columns, half // 32, 8, 4).transpose(0, 2, 4, 3, 1)
    return np.stack([both & 15, both >> 4], axis=3).reshape(count, 2 * half, columns)


def pack_nibbles(value: np.ndarray) -> np.ndarray:
    """u4[.., K] -> u8[.., K / 2]: the even column low; a zero behind an odd K."""
    numbers = value.astype(np.uint8)
    if numbers.shape[-1] % 2:
        numbers = np.concatenate([numbers, np.zeros((*numbers.shape[:-1], 1), np.uint8)], axis=-1)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4
