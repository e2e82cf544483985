"""Sums over ranks by NCCL, as its C API has them (nccl.h of 2.27): ctypes on libnccl.so.2.

Comes in: a rank's number, memory that the ranks share. Goes out: `Communicator`. Must not know: programs, steps.

Rank 0 makes the communicator's identity and puts it into the shared memory: 128 bytes behind 8 that say it is there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime.cuda.driver import Stream

_ID_BYTES = 128
#: ncclDataType_t and ncclRedOp_t.
_TYPES = {"f32": 7, "bf16": 9}
_SUM = 0
_WAIT_SECONDS = 0.001


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


def _library() -> ctypes.CDLL:
    """From the package nvidia-nccl-cu13, or else from the system. Raises EnvironmentFault."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    found = [str(path) for folder in folders or () if (path := Path(folder) / "nccl/lib/libnccl.so.2").exists()]
    for name in (*found, "libnccl.so.2"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EnvironmentFault("NCCL, which a plan of several ranks needs, is not there: pip install 'llmc[cuda]'")


class Communicator:
    """All ranks of a plan. `comm`: u8, memory that they share, zeros at first. Waits until all of them are here."""

    def __init__(self, rank: int, ranks: int, comm: np.ndarray) -> None:
        self._library = _library()
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        unique = _UniqueId()
        ready = comm[:8].view(np.int64)
        if rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique))
            comm[8 : 8 + _ID_BYTES] = np.frombuffer(bytes(unique), np.uint8)
            ready[0] = 1
        while not ready[0]:  # the executor ends ranks that never are
            time.sleep(_WAIT_SECONDS)
        ctypes.memmove(ctypes.byref(unique), comm[8:].ctypes.data, _ID_BYTES)
        self._library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
        self._call("ncclCommInitRank", ctypes.byref(self._handle), ranks, unique, rank)

    def capsule(self) -> Any:
        """The ncclComm_t as TensorRT takes it."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(self._handle, None, None)

    def all_reduce(self, address: int, count: int, dtype: str, stream: Stream) -> None:
        """Sums `count` elements at an address of the GPU's memory over all ranks, in place; also while captured."""
        pointer = ctypes.c_void_p(address)
        queue = ctypes.c_void_p(int(stream.handle))
        size = ctypes.c_size_t(count)
        self._call("ncclAllReduce", pointer, pointer, size, _TYPES[dtype], _SUM, self._handle, queue)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            words = self._library.ncclGetErrorString(code).decode()
            raise EnvironmentFault(f"NCCL: {name}: {words} (NCCL_DEBUG=INFO says more)")
