"""One digest of llmc's own source files: what was cached by other code is not used. Comes in: names of rooms. Goes out:
a digest. Must not know: what is cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_SOURCES = frozenset({".py", ".h", ".cpp", ".yaml", ".json"})


@cache
def sources_digest(rooms: tuple[str, ...]) -> str:
    """Hex SHA-256 over the names and bytes of all source files of the rooms, read without importing them."""
    digest = hashlib.sha256()
    for room in rooms:
        for name, path in sorted(_files(room)):
            digest.update(f"{room}/{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _files(room: str) -> Iterable[tuple[str, Path]]:
    spec = importlib.util.find_spec(f"llmc.{room}" if room else "llmc")
    assert spec is not None, f"llmc has no room {room!r}"
    for location in spec.submodule_search_locations or ():
        for path in Path(location).rglob("*"):
            if path.suffix in _SOURCES:
                yield path.relative_to(location).as_posix(), path
