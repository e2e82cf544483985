"""The weights that a calibration rounded: a safetensors file beside its table, pinned by the table's hash.

Comes in: a table and its folder; or, to write one, linear modules with their E4M3 bytes and scales, in any order. Goes
out: a source of stored tensors; the file. Must not know: how weights were rounded, graphs, recipes.

    <module>.weight         E4M3 [N, K], by output channels whatever the checkpoint's layout
    <module>.weight_scale   f32 [N]
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from llmc.artifacts.calibration import CalibrationTable
from llmc.artifacts.errors import CheckpointError, UsageError
from llmc.artifacts.files import disk_errors
from llmc.artifacts.hashing import sha256_file
from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.checkpoint.safetensors_file import SafetensorsFile

_SAFETENSORS = {"f8e4m3": "F8_E4M3", "f32": "F32"}


def weight_name(module: str) -> str:
    """The tensor of a module's E4M3 bytes."""
    return f"{module}.weight"


def scale_name(module: str) -> str:
    """The tensor of a module's scales."""
    return f"{module}.weight_scale"


def zero_name(module: str) -> str:
    """The tensor of a module's zero points, of INT4."""
    return f"{module}.weight_zero"


class RoundedWeights:
    """The file of a table, complete and unchanged."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file

    @classmethod
    def open(cls, table: CalibrationTable) -> RoundedWeights:
        """Raises UsageError for a file that is missing, and CheckpointError for one that is not the table's."""
        if table.rounded is None or table.folder is None:
            raise ValueError("a table of ranges alone has no rounded weights")
        path, remedy = table.folder / table.rounded.file, "copy it from where the table was made, or calibrate again"
        if not path.is_file():
            raise UsageError(f"{path}: no such file; the calibration table needs its rounded weights: {remedy}")
        if (found := sha256_file(path)) != table.rounded.sha256:
            raise CheckpointError(
                f"{path}: has SHA-256 {found}, the calibration table says {table.rounded.sha256}: {remedy}"
            )
        return cls(SafetensorsFile.open(path))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; raises CheckpointError if there is none of this name."""
        self._require(name)
        return self._file.entries[name].info.shape

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Rows start:stop of a tensor, in its stored dtype."""
        self._require(name)
        first, last, _ = slice(start, stop).indices(self.shape(name)[0])
        return self._file.read(name, first, max(first, last))

    def _require(self, name: str) -> None:
        if name not in self._file.entries:
            raise CheckpointError(f"{self._file.path}: has no tensor {name!r}, which the calibration table promises")


def open_rounded(table: CalibrationTable | None) -> RoundedWeights | None:
    """`RoundedWeights.open` of a table that has some, else None."""
    return None if table is None or table.rounded is None else RoundedWeights.open(table)


class RoundedWriter:
    """Writes such a file at `path`, a module at a time; use it in a `with`. `shapes`: [N, K] of every module that will
    be added. Modules that never are leave zeros, so whoever writes must add all.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._path, self._offsets, header, at = path, dict[str, int](), {}, 0
        for module in sorted(shapes):
            rows = shapes[module][0]
            for name, dtype, shape in (
                (weight_name(module), "f8e4m3", shapes[module]),
                (scale_name(module), "f32", (rows,)),
            ):
                nbytes = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
                entry: dict[str, str | Sequence[int]] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape)}
                header[name] = entry | {"data_offsets": [at, at + nbytes]}
                self._offsets[name], at = at, at + nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)  # the format aligns the data so
        self._head = len(raw).to_bytes(8, "little") + raw
        with disk_errors(path):
            self._file = path.open("wb")
            self._file.write(self._head)
            self._file.truncate(len(self._head) + at)

    def add(self, module: str, weight: np.ndarray, scale: np.ndarray) -> None:
        """E4M3 [N, K] and f32 [N]."""
        for name, value in ((weight_name(module), weight), (scale_name(module), scale)):
            with disk_errors(self._path):
                self._file.seek(len(self._head) + self._offsets[name])
                self._file.write(np.ascontiguousarray(value).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, trace: TracebackType | None) -> None:
        self._file.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)
