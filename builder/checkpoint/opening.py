"""Which kind of checkpoint a path is. Comes in: a path. Goes out: a `Checkpoint`. Must not know: the formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmc.artifacts.errors import CheckpointError
from llmc.artifacts.hashing import sha256_file
from llmc.builder.checkpoint.checkpoint import Checkpoint
from llmc.builder.checkpoint.config_only import ConfigSource
from llmc.builder.checkpoint.directory import CONFIG, DirectorySource
from llmc.builder.checkpoint.gguf_source import GgufSource
from llmc.builder.checkpoint.packed import PackedSource
from llmc.builder.checkpoint.quantized import QuantizedSource
from llmc.builder.checkpoint.source import Source


def open_checkpoint(path: str | Path, sha256: Callable[[Path], str] = sha256_file) -> Checkpoint:
    """Opens a Hugging Face directory or a GGUF file: headers and JSON, no weights, no hashing, which `sha256` does when
    the pin is asked for.

    Raises CheckpointError for what is missing or damaged, UnsupportedError for what is whole but cannot be compiled.
    """
    if not str(path):
        raise CheckpointError("--model is empty; it takes a Hugging Face checkpoint's folder or a GGUF file")
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder; --model takes a local checkpoint, nothing is downloaded"
        )
    source: Source
    if path.is_dir():
        folder = DirectorySource(path)
        source = _unquantized(folder)
    elif path.stat().st_size == 0:
        raise CheckpointError(f"{path}: is an empty file; fetch it again")
    elif path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path}: is one file of a checkpoint; pass its folder, {path.parent}")
    else:
        source = GgufSource(path)
    return Checkpoint(path, source, sha256)


def _unquantized(folder: DirectorySource) -> Source:
    """The folder, or what its quantized weights stand for."""
    scheme = folder.scheme
    if scheme is None:
        return folder
    return PackedSource(folder, scheme) if scheme.weights == "int4" else QuantizedSource(folder, scheme)


def open_config(path: str | Path) -> Checkpoint:
    """A checkpoint for arithmetic alone: a folder may also hold a config.json and no weights. Raises what
    `open_checkpoint` raises.
    """
    folder = Path(path)
    if str(path) and (folder / CONFIG).is_file() and not any(folder.glob("*.safetensors")):
        return Checkpoint(folder, ConfigSource(folder))
    return open_checkpoint(path)
