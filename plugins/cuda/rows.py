"""How launches of the cuda targets walk over rows: strides, block sizes, warps.

Comes in: types. Goes out: arguments and numbers for `CudaCall`s. Must not know: builder, runtime, operators.
"""

from __future__ import annotations

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.plugins.cpu.call import RowStride, Side
from llmc.plugins.cuda.call import Product

#: The widest row that one program holds in registers: 64 numbers a thread.
MAX_ROW = 65536


def row_stride(side: Side, index: int, kind: TensorType) -> RowStride | int:
    """The `RowStride` of a matrix; of anything else the length of its last axis (1 without one): rows side by side."""
    return RowStride(side, index) if kind.rank == 2 else int(kind.shape[-1]) if kind.rank else 1


def row_count(kind: TensorType) -> Product:
    """How many rows the last axis is taken over."""
    return Product(kind.shape[:-1])


def block_of(width: int) -> int:
    """The power of two that covers a row. Raises UnsupportedError for a row that no program can hold."""
    if width > MAX_ROW:
        raise UnsupportedError(f"rows of {width} numbers: the cuda targets take at most {MAX_ROW}")
    return power_of_two(width)


def power_of_two(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << max(0, number - 1).bit_length()


def warps_of(block: int) -> int:
    """So many warps that a thread holds eight numbers of a row where the row allows it, and at most 32 warps."""
    return min(32, max(1, block // 256))
