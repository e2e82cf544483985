"""SHA-256 of files and the one digest of a checkpoint. Standard library only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from llmc.artifacts.schema import SourceFile

_CHUNK = 1 << 22


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces; OSError as `open` raises it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def hash_source(root: Path, name: str, sha256: Callable[[Path], str] = sha256_file) -> SourceFile:
    """The record of the file `name` below the folder `root`; `sha256` may know a file's digest without reading it."""
    path = root / name
    return SourceFile(name, path.stat().st_size, sha256(path))


def checkpoint_digest(files: Iterable[SourceFile]) -> str:
    """SHA-256 over the lines `sha256  name`, sorted by name: the order of reading does not matter."""
    lines = [f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda f: f.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
