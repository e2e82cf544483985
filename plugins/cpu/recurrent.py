"""How many bytes a recurrent state takes where the kernels of the cpu target keep it, see recurrent.h.

Comes in: a state's shape. Goes out: `state_bytes`, `stored`, `logical`. Must not know: builder, runtime, operators.
"""

from __future__ import annotations

from math import prod

import numpy as np

#: Channels of a block, as many as a kernel has lanes.
LANES = 16


def state_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a state f32[.., R, C] of one sequence: whole blocks of channels."""
    return 4 * prod(shape[:-1]) * -(-shape[-1] // LANES) * LANES


def stored(state: np.ndarray) -> np.ndarray:
    """f32[.., R, C] as it is stored: f32[.., blocks, R, 16]."""
    *lead, rows, channels = state.shape
    blocks = -(-channels // LANES)
    wide = np.zeros((*lead, rows, blocks * LANES), np.float32)
    wide[..., :channels] = state
    return np.ascontiguousarray(np.moveaxis(wide.reshape(*lead, rows, blocks, LANES), -2, -3))


def logical(memory: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `stored`: the state of that shape from as many floats as `state_bytes` says."""
    *lead, rows, channels = shape
    blocks = -(-channels // LANES)
    wide = np.moveaxis(memory.reshape(*lead, blocks, rows, LANES), -3, -2)
    return np.ascontiguousarray(wide.reshape(*lead, rows, blocks * LANES)[..., :channels])
