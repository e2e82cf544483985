"""The header of a GGUF file: metadata and where each tensor lies, checked against the file.

Comes in: a path. Goes out: `GgufHeader`. Must not know: Hugging Face names, architectures. Needs `gguf` only for
the block sizes. Read here and not by that package, because it answers a truncated file with whatever numpy says.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint.source import refuse_lfs_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """`shape` slowest dimension first (as torch has it), `kind` the GGML type number, `offset` in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (arrays are lists) and tensors by their GGUF names, in the file's order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The key `general.architecture`."""
        return str(self.metadata["general.architecture"])


class _Cursor:
    """Reads values off the mapped file; raises CheckpointError past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.what = path, data, 0, "the header"

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path}: {self.what} needs {count} bytes at byte {self.at}, the file has {len(self.data)}: it is "
                f"truncated or damaged. Fetch it again"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code)))

    def string(self) -> str:
        return self.take(self.unpack("Q")[0]).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: {self.what} has value type {kind}, which GGUF does not define")
        element, count = self.unpack("I")[0], self.unpack("Q")[0]
        if element in _SCALARS:
            return list(self.unpack(_SCALARS[element], count))
        return [self.value(element) for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for a file that is no complete GGUF, UnsupportedError for a kind that is not read."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            refuse_lfs_pointer(path, head)
            if not head.startswith(_MAGIC):
                raise CheckpointError(f"{path}: starts with {head[:4]!r}, not with {_MAGIC!r}: it is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(path, data))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    cursor.take(4)
    version = cursor.unpack("I")[0]
    if version not in _VERSIONS:
        raise UnsupportedError(
            f"{path}: is GGUF version {version}; versions {' and '.join(map(str, _VERSIONS))}, little endian, are read"
        )
    tensor_count, metadata_count = cursor.unpack("Q", 2)
    metadata = {}
    for _ in range(metadata_count):
        key = cursor.string()
        cursor.what = f"metadata {key!r}"
        metadata[key] = cursor.value(cursor.unpack("I")[0])
    if "general.architecture" not in metadata:
        raise CheckpointError(f"{path}: has no general.architecture in its metadata: it is damaged or not a model")
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedError(
            f"{path}: is one of {metadata['split.count']} parts (split.count); join them: llama-gguf-split --merge"
        )
    raw = [_tensor_entry(cursor, index) for index in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32)) or 1
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(path, metadata, {entry[0]: _place(path, *entry, start) for entry in raw})


def _tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    cursor.what = f"the entry of tensor {index}"
    name = cursor.string()
    dims = cursor.unpack("Q", cursor.unpack("I")[0])
    kind, offset = cursor.unpack("I")[0], cursor.unpack("Q")[0]
    return name, tuple(reversed(dims)), kind, offset


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise UnsupportedError(f"{path}: tensor {name!r} has GGML type {kind}, which is not read") from None
    if shape and shape[-1] % elements:
        raise CheckpointError(f"{path}: tensor {name!r} {list(shape)} does not divide into blocks of {elements}")
    total = math.prod(shape) // elements * nbytes
    size = path.stat().st_size
    if start + offset + total > size:
        raise CheckpointError(
            f"{path}: tensor {name!r} needs bytes {start + offset} to {start + offset + total}, the file has {size}: "
            f"it is truncated. Fetch it again"
        )
    return GgufTensor(shape, kind, start + offset, total)
