"""What builds have made, by what it was made from, so that building again makes only what has changed: object files,
traced graphs, calibration tables, file hashes, reports of builds; each kind in a folder of its own.

Comes in: keys (hex digests), bytes. Goes out: bytes. Must not know: what the bytes are. The key says everything that
they depend on, so an entry never becomes wrong; the oldest go when the folder grows beyond its limit.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import EnvironmentFault

#: Bytes that the folder may hold.
LIMIT = 512 << 20


def default_folder(kind: str = "objects") -> Path:
    """`$XDG_CACHE_HOME/llmc/<kind>`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmc" / kind


@dataclass(frozen=True)
class ObjectCache:
    """A folder of objects; `limit` in bytes, `suffix` of the files' names."""

    folder: Path
    limit: int = LIMIT
    suffix: str = ".o"

    def get(self, key: str) -> bytes | None:
        """The object, or None."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            path.touch()  # the newest stay
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._fault("read", error) from error
        return data

    def put(self, key: str, data: bytes) -> None:
        """Writes aside, then renames: builds that run at the same time may share the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".partial", delete=False) as file:
                file.write(data)
            os.replace(file.name, self._path(key))
        except OSError as error:
            raise self._fault("write", error) from error

    def prune(self) -> None:
        """Removes the objects that were used longest ago, until the rest fits the limit."""
        entries = []
        for path in self.folder.glob(f"*{self.suffix}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{self.suffix}"

    def _fault(self, verb: str, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(
            f"cannot {verb} the cache {self.folder}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "folder that can be written"
        )
