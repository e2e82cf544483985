"""One safetensors file: header checked against the file, tensors read by rows.

Comes in: a path. Goes out: `SafetensorsFile` (entries, `read`). Must not know: shards, configs, names' meaning.
numpy has no bfloat16, so that the `safetensors` package cannot hand out arrays of it without torch; the format is a
length (u64, little endian), a JSON header of that many bytes, and the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint.source import TensorInfo, read_exactly, refuse_lfs_pointer

#: Name in the header -> (our name, numpy dtype).
DTYPES: dict[str, tuple[str, np.dtype]] = {
    "F64": ("f64", np.dtype(np.float64)),
    "F32": ("f32", np.dtype(np.float32)),
    "F16": ("f16", np.dtype(np.float16)),
    "BF16": ("bf16", np.dtype(ml_dtypes.bfloat16)),
    "F8_E4M3": ("f8e4m3", np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": ("f8e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    "I64": ("i64", np.dtype(np.int64)),
    "I32": ("i32", np.dtype(np.int32)),
    "I16": ("i16", np.dtype(np.int16)),
    "I8": ("i8", np.dtype(np.int8)),
    "U64": ("u64", np.dtype(np.uint64)),
    "U32": ("u32", np.dtype(np.uint32)),
    "U16": ("u16", np.dtype(np.uint16)),
    "U8": ("u8", np.dtype(np.uint8)),
    "BOOL": ("bool", np.dtype(np.bool_)),
}
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: `offset` is the byte of the file where it starts."""

    info: TensorInfo
    dtype: np.dtype
    offset: int


@dataclass(frozen=True)
class SafetensorsFile:
    """An existing, complete file and what its header lists."""

    path: Path
    entries: dict[str, Entry]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Reads and checks the header; raises CheckpointError for anything that does not fit the file."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(8)
                refuse_lfs_pointer(path, head + file.read(32))
                length = int.from_bytes(head, "little")
                _check_length(path, size, head, length)
                file.seek(8)
                raw = file.read(length)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        return cls(path, _entries(path, _parse(path, raw), 8 + length, size))

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start:stop of a tensor in its own dtype, copied out of the file."""
        entry = self.entries[name]
        shape = entry.info.shape
        row = math.prod(shape[1:]) * entry.dtype.itemsize
        data = read_exactly(self.path, entry.offset + start * row, (stop - start) * row, name)
        return data.view(entry.dtype).reshape((stop - start, *shape[1:]) if shape else ())


def _check_length(path: Path, size: int, head: bytes, length: int) -> None:
    if len(head) < 8 or 8 + length > size:
        need = 8 + length if len(head) == 8 else 8
        raise CheckpointError(
            f"{path}: the header needs {need} bytes, the file has {size}: it is truncated or not a safetensors file. "
            f"Fetch it again"
        )
    if length > _MAX_HEADER:
        raise CheckpointError(
            f"{path}: the header says that it is {length} bytes long, the format allows {_MAX_HEADER}: not a "
            f"safetensors file, or damaged. Fetch it again"
        )


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: the header is not JSON ({error}): the file is damaged. Fetch it again"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, not an object; fetch it again")
    return header


def _entries(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, Entry]:
    entries = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype_name, shape = item["dtype"], tuple(int(d) for d in item["shape"])
            begin, end = (int(o) for o in item["data_offsets"])
            if min(begin, *shape, 0) < 0:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(
                f"{path}: tensor {name!r} has a damaged entry {item!r}; fetch the file again"
            ) from None
        if dtype_name not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {dtype_name!r}; this llmc reads {', '.join(DTYPES)}"
            )
        ours, dtype = DTYPES[dtype_name]
        expected = math.prod(shape) * dtype.itemsize
        if end - begin != expected:
            raise CheckpointError(
                f"{path}: tensor {name!r} {dtype_name}{list(shape)} needs {expected} bytes, its header entry gives it "
                f"{end - begin}: the file is damaged. Fetch it again"
            )
        if start + end > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} needs bytes {start + begin} to {start + end}, the file has {size}: it is "
                f"truncated. Fetch it again"
            )
        entries[name] = Entry(TensorInfo(ours, shape), dtype, start + begin)
    if not entries:
        raise CheckpointError(f"{path}: holds no tensors")
    end_of_data = max(e.offset + math.prod(e.info.shape) * e.dtype.itemsize for e in entries.values())
    if end_of_data != size:
        raise CheckpointError(
            f"{path}: its tensors end at byte {end_of_data}, the file has {size}: bytes were added, or the header is "
            f"damaged. Fetch it again"
        )
    return entries
