"""The weights that a calibration rounded: a safetensors file beside its table, pinned by the table's hash.

Comes in: a table and its folder; or, to write one, linear modules with their numbers and scales, in any order. Goes
out: a source of stored tensors; the file. Must not know: how weights were rounded, graphs, recipes.

    <module>.weight         E4M3 [N, K], by output channels whatever the checkpoint's layout
    <module>.weight_scale   f32 [N]

of the experts of a layer, by the path of the parameter that they are: [E, N, K] and [E, N];

for a table of INT8 weights:

    <module>.weight         I8 [N, K]
    <module>.weight_scale   F32 [N]
    <module>.input_factors  F32 [K], what the input of this module (and of others) is multiplied by; not of every module

and for one of INT4 weights, in groups of 128 columns:

    <module>.weight         U8 [N, K], numbers from 0 to 15
    <module>.weight_scale   F16 [N, G]
    <module>.weight_zero    U8 [N, G]

An output head is E4M3 beside INT4 weights too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from llmc.artifacts.calibration import CalibrationTable
from llmc.artifacts.errors import CheckpointError, UsageError
from llmc.artifacts.files import disk_errors
from llmc.artifacts.hashing import sha256_file
from llmc.artifacts.types import INT4_GROUP, NUMPY_DTYPES
from llmc.builder.checkpoint.safetensors_file import SafetensorsFile

_SAFETENSORS = {"f8e4m3": "F8_E4M3", "f32": "F32", "f16": "F16", "i8": "I8", "u4": "U8"}


def weight_name(module: str) -> str:
    """The tensor of a module's E4M3 bytes."""
    return f"{module}.weight"


def scale_name(module: str) -> str:
    """The tensor of a module's scales."""
    return f"{module}.weight_scale"


def zero_name(module: str) -> str:
    """The tensor of a module's zero points, of INT4."""
    return f"{module}.weight_zero"


def factors_name(module: str) -> str:
    """The tensor of the factors of a module's input, of INT8."""
    return f"{module}.input_factors"


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
        value = self._file.read(name, first, max(first, last))
        return value.view(NUMPY_DTYPES["u4"]) if value.dtype == np.uint8 else value

    def _require(self, name: str) -> None:
        if name not in self._file.entries:
            raise CheckpointError(f"{self._file.path}: has no tensor {name!r}, which the calibration table promises")


def open_rounded(table: CalibrationTable | None) -> RoundedWeights | None:
    """`RoundedWeights.open` of a table that has some, else None."""
    return None if table is None or table.rounded is None else RoundedWeights.open(table)


def _tensors(module: str, shape: tuple[int, ...], weights: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor of a module [N, K], or of experts [E, N, K]."""
    if weights != "int4":
        dtype = {"fp8": "f8e4m3", "int8": "i8"}[weights]
        return [(weight_name(module), dtype, shape), (scale_name(module), "f32", shape[:-1])]
    groups = (*shape[:-1], -(-shape[-1] // INT4_GROUP))
    return [(weight_name(module), "u4", shape), (scale_name(module), "f16", groups), (zero_name(module), "u4", groups)]


class RoundedWriter:
    """Writes such a file at `path`, a module or some rows of one at a time; use it in a `with`. `shapes`: [N, K] of
    every module that will be added, [E, N, K] of experts, whose first axis counts as rows; `weights` fp8|int8|int4,
    `head`: the module that is fp8 beside any; `smoothed`: modules that may have factors of their input. What is never
    added is zeros, so whoever writes must add all.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        weights: str = "fp8",
        head: str | None = None,
        smoothed: Collection[str] = (),
    ) -> None:
        self._path, self._offsets, header, at = path, dict[str, int](), {}, 0
        kinds = {module: "fp8" if module == head else weights for module in shapes}
        self._tensors = {module: _tensors(module, shape, kinds[module]) for module, shape in shapes.items()}
        self._factors = {module: (factors_name(module), "f32", shapes[module][-1:]) for module in smoothed}
        for module in sorted(shapes):
            for name, dtype, shape in (*self._tensors[module], *filter(None, (self._factors.get(module),))):
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

    def add(self, module: str, *parts: np.ndarray, start: int = 0) -> None:
        """Rows of the module's tensors, from `start` on, in the order above: numbers of the format in any dtype that
        holds them.
        """
        for (name, dtype, _), value in zip(self._tensors[module], parts, strict=True):
            self._write(name, dtype, value, start)

    def add_factors(self, module: str, factors: np.ndarray) -> None:
        """Those [K] of the module's input."""
        name, dtype, _ = self._factors[module]
        self._write(name, dtype, factors)

    def _write(self, name: str, dtype: str, value: np.ndarray, start: int = 0) -> None:
        stored = value.astype(np.uint8 if dtype == "u4" else NUMPY_DTYPES[dtype])
        before = start * math.prod(stored.shape[1:]) * stored.itemsize
        with disk_errors(self._path):
            self._file.seek(len(self._head) + self._offsets[name] + before)
            self._file.write(np.ascontiguousarray(stored).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, trace: TracebackType | None) -> None:
        self._file.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)
