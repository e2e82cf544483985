"""What a checkpoint is read from: the interface that the formats implement. Must not know: any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError
from llmc.artifacts.types import KVScales


@dataclass(frozen=True)
class TensorInfo:
    """`dtype` as `read` returns it ("f32", "bf16", ...), `shape` as Hugging Face has it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """The small files of a checkpoint: everything that is neither weights nor config."""

    tokenizer_json: bytes
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    generation_config: dict[str, Any]


@dataclass(frozen=True)
class Scheme:
    """`name` for people. `activations` static, token or (weights only) none. `block`: rows and columns that share a
    scale; None where a scale belongs to a row or to the whole weight. `kv` says that the cache was to be quantized.
    `weights` fp8|int8|int4: the precision that keeps them. Of INT4: columns of a `group` (-1: all), and `zero_offset`,
    what stored zero points lack.
    """

    name: str
    activations: str
    block: tuple[int, int] | None = None
    kv: bool = False
    weights: str = "fp8"
    group: int = 0
    zero_offset: int = 0


@dataclass(frozen=True)
class StoredLinear:
    """A module's weight as stored: the E4M3 or INT8 tensor, its scales (f32[N] when read), the scale of its input
    (None: each token's own). Of INT4: numbers u4[N,K], scales f16[N,G], zero points u4[N,G].
    """

    weight: str
    scale: str
    input_scale: float | None
    zero: str | None = None


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's own quantization is. `linears`: module -> what is stored of it; empty where no kernel takes
    it, for `reason`, and the weights count as plain float32. `kv`: layer -> the scales of its keys and values, where it
    has them: one number each, or one a KV head.
    """

    scheme: Scheme
    linears: Mapping[str, StoredLinear] = field(default_factory=dict)
    kv: Mapping[int, KVScales] = field(default_factory=dict)
    reason: str = ""

    def notes(self, precision: str) -> list[str]:
        """What of it a build of that precision does not take over, in words."""
        scheme, notes = self.scheme, list[str]()
        if precision != scheme.weights:
            notes.append(f"the checkpoint's {scheme.name} weights count as the numbers that they stand for")
        elif not self.linears:
            notes.append(f"the checkpoint's {scheme.name} is not kept ({self.reason}): its weights are rounded anew")
        return notes

    def cache_notes(self, kv_dtype: str) -> list[str]:
        """What an engine with such a cache does not take over of a quantized one, in words."""
        if not self.scheme.kv or (kv_dtype == "f8e4m3" and self.kv):
            return []
        if kv_dtype == "f8e4m3":
            return [f"the checkpoint's quantized cache ({self.scheme.name}) has no scales: they are calibrated"]
        return [
            f"the checkpoint's quantized cache ({self.scheme.name}) is not kept: keys and values are {kv_dtype}; "
            "--kv-cache-dtype fp8 keeps it"
        ]


class Source(ABC):
    """One checkpoint in one format. Everything but `files` may be computed on first use."""

    format: str
    #: The folder that `files` are relative to.
    root: Path
    #: Every file that a build reads, relative to `root`.
    files: tuple[str, ...]
    #: The model's name for people: never a path.
    name: str

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of config.json, or what stands for it."""

    @property
    @abstractmethod
    def texts(self) -> Texts:
        """Tokenizer, template and generation defaults."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by their Hugging Face names."""

    @property
    def quantization(self) -> Quantization | None:
        """What the weights were quantized with before llmc saw them."""
        return None

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Stored numbers; a tied matrix counts once."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start:stop of a tensor that `tensors` holds; 0:1 of a scalar is the scalar."""

    def stored(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor that `quantization` names: a weight's numbers, its scales, its zero points."""
        raise AssertionError(f"{self.root} is not quantized: nothing is stored as {name!r}")

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of all that `stored` gives."""
        raise AssertionError(f"{self.root} is not quantized: nothing is stored as {name!r}")


class Decoded(Source):
    """The inner source with quantized weights as the numbers that they stand for, and what says so hidden."""

    def __init__(self, inner: Source, scheme: Scheme) -> None:
        self._inner, self._scheme = inner, scheme
        self.format, self.root, self.files, self.name = inner.format, inner.root, inner.files, inner.name

    @property
    def config(self) -> dict[str, Any]:
        """config.json, without what says that it is quantized."""
        return {key: value for key, value in self._inner.config.items() if key != "quantization_config"}

    @property
    def texts(self) -> Texts:
        """The inner source's."""
        return self._inner.texts


def read_exactly(path: Path, offset: int, nbytes: int, tensor: str) -> np.ndarray:
    """`nbytes` of a file as u8; raises CheckpointError with the numbers when there are fewer."""
    try:
        data = np.fromfile(path, np.uint8, nbytes, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path}: tensor {tensor!r} cannot be read: {error.strerror or error}") from error
    if data.nbytes != nbytes:
        raise CheckpointError(
            f"{path}: tensor {tensor!r} needs {nbytes} bytes at byte {offset}, the file gave {data.nbytes}: it is "
            f"truncated. Fetch it again"
        )
    return data


LFS_MAGIC = b"version https://git-lfs"


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    """Raises CheckpointError when the file is git-LFS's note of a file that was never fetched."""
    if head.startswith(LFS_MAGIC):
        raise CheckpointError(
            f"{path}: is a git-LFS pointer of {path.stat().st_size} bytes, not the weights themselves. "
            f"Run `git lfs pull` in the checkpoint's folder"
        )
