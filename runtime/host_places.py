"""Places for blocks in host memory, in a file without a name that the core and every rank map.

Comes in: sizes, a file descriptor. Goes out: views of the places. Must not know: whose blocks, when they are copied.
Standard library and numpy only, as ranks import it.

A rank copies its share of a block between the pool and a place; the core, which sees the shares of all ranks, moves
whole places to a disk and back. Who may touch a place when is `HostMemory`'s business.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np

_PAGE = 4096


class HostPlaces:
    """`count` places; `sizes` are each rank's bytes of a block. Takes memory only where it is touched."""

    def __init__(self, sizes: Sequence[int], count: int, descriptor: int) -> None:
        data = mmap.mmap(descriptor, self.nbytes(sizes, count))
        with contextlib.suppress(OSError):  # a kernel without huge pages
            data.madvise(mmap.MADV_HUGEPAGE)
        #: u8[count, sizes[r]] of each rank r.
        self.rows: list[np.ndarray] = []
        offset = 0
        for size in sizes:
            self.rows.append(np.frombuffer(data, np.uint8, size * count, offset).reshape(count, size))
            offset += _whole_pages(size * count)

    @staticmethod
    def nbytes(sizes: Sequence[int], count: int) -> int:
        """Bytes of the file."""
        return max(sum(_whole_pages(size * count) for size in sizes), 1)

    def content(self, place: int) -> list[memoryview]:
        """What lies in a place, rank by rank, to be read and written."""
        return [rows[place].data for rows in self.rows]


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
