"""Records of one size in a file of this process's own, each of which is either read back as written or not at all.

Comes in: a folder, bytes. Goes out: the same bytes, or the news that they are lost. Must not know: what they are.
Standard library only.

The file has no name from its first moment on (O_TMPFILE; where the file system has none of that, it is unlinked at
once), and only its owner may read it: nobody else opens it, and nothing is left of it however the process ends. A
record is sealed with a keyed BLAKE2b of its number, its tag and its content (RFC 7693): of one that was damaged, cut
short or belongs elsewhere, the seal does not fit.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from llmc.artifacts.errors import EnvironmentFault

_SEAL_BYTES = 16
_PAGE = 4096


def record_bytes(payload: int) -> int:
    """What a record of so many bytes takes of the disk, seal included: whole pages."""
    return -(-(payload + _SEAL_BYTES) // _PAGE) * _PAGE


def _open(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    descriptor, name = tempfile.mkstemp(prefix="llmc-kv-", dir=folder)
    os.unlink(name)
    return descriptor


class RecordFile:
    """Records of `payload` bytes by number. Raises EnvironmentFault where the folder takes no file."""

    def __init__(self, folder: Path, payload: int) -> None:
        self.folder = folder
        self.payload = payload
        self._stride = record_bytes(payload)
        self._key = secrets.token_bytes(32)
        try:
            self.descriptor = _open(folder)
        except OSError as error:
            raise EnvironmentFault(f"--kv-disk {folder}: cannot create a file there: {error.strerror}") from error

    def write(self, number: int, tag: int, parts: Sequence[memoryview]) -> None:
        """Raises OSError where the record was not written whole."""
        data = [*parts, memoryview(self._seal(number, tag, parts))]
        if os.pwritev(self.descriptor, data, number * self._stride) != self.payload + _SEAL_BYTES:
            raise OSError(errno.ENOSPC, "a record was cut short")

    def read(self, number: int, tag: int, parts: Sequence[memoryview]) -> bool:
        """Fills the parts; False where they are not what was written under this number and tag."""
        seal = bytearray(_SEAL_BYTES)
        try:
            found = os.preadv(self.descriptor, [*parts, seal], number * self._stride)
        except OSError:  # a medium that fails is as good as one that has forgotten
            return False
        return found == self.payload + _SEAL_BYTES and seal == self._seal(number, tag, parts)

    def discard(self) -> None:
        """Gives the disk back what was written."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """The file is gone with that."""
        os.close(self.descriptor)

    def _seal(self, number: int, tag: int, parts: Sequence[memoryview]) -> bytes:
        seal = blake2b(key=self._key, digest_size=_SEAL_BYTES)
        seal.update(number.to_bytes(8, "little") + tag.to_bytes(8, "little"))
        for part in parts:
            seal.update(part)
        return seal.digest()
