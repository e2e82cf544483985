"""Calibration tables by what they were made from, so that building again calibrates only what has changed.

Comes in: keys (hex digests). Goes out: paths of tables, each with its rounded weights beside it. Must not know: what a
table holds. Tables that were used longest ago go when the folder grows beyond its limit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import EnvironmentFault

#: Bytes that the folder may hold beside the newest table.
LIMIT = 4 << 30


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/llmc/calibration`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmc" / "calibration"


@dataclass(frozen=True)
class TableCache:
    """A folder of tables; `limit` in bytes."""

    folder: Path
    limit: int = LIMIT

    def path(self, key: str) -> Path:
        """Where the table of this key stands, or would."""
        return self.folder / f"{key}.json"

    def holds(self, path: Path) -> bool:
        """Whether table and weights are there; marks them as used."""
        files = (path, path.with_suffix(".safetensors"))
        if not all(file.is_file() for file in files):
            return False
        with contextlib.suppress(OSError):  # another build may remove them, or the folder may be read-only
            os.utime(path)
        return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, the folder exists; raises EnvironmentFault where it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot keep calibration tables in {self.folder}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
                "folder that can be written"
            ) from error
        yield

    def prune(self, newest: Path) -> None:
        """Removes tables that were used longest ago, until the rest fits the limit; `newest` stays."""
        entries = []
        for path in self.folder.glob("*.json"):
            weights = path.with_suffix(".safetensors")
            with contextlib.suppress(FileNotFoundError):
                entries.append((path.stat().st_mtime_ns, path.stat().st_size + weights.stat().st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                path.with_suffix(".safetensors").unlink(missing_ok=True)
                total -= size
