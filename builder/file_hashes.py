"""SHA-256 of files, remembered by what the file system says of them, so that an unchanged file is not read again.

Comes in: paths, a cache or none. Goes out: digests. Must not know: what the files are.

A digest counts as long as device, inode, size, time of change and time of status change are the same; the last of these
no program can set. A file that changed less than two seconds ago is not remembered: it could change once more within
one tick of the clock (git's "racy" entries).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.hashing import sha256_file
from llmc.builder.cpu.cache import ObjectCache

_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class FileHashes:
    """`cache` None: every file is read."""

    cache: ObjectCache | None

    def sha256(self, path: Path) -> str:
        """Hex SHA-256 of a file; OSError as `open` raises it."""
        if self.cache is None:
            return sha256_file(path)
        key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
        identity = _identity(path)
        known = self.cache.get(key)
        if known is not None:
            entry = json.loads(known)
            if entry["identity"] == identity:
                return str(entry["sha256"])
        digest = sha256_file(path)
        if _identity(path) == identity and time.time_ns() - max(identity[-2:]) > _SETTLED_NS:
            self.cache.put(key, json.dumps({"identity": identity, "sha256": digest}).encode())
        return digest


def _identity(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
