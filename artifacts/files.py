"""Files that stand complete at their path or not at all, and what disks refuse, as errors with a remedy.

Comes in: a path, the option that named it. Goes out: the file, or EnvironmentFault. Must not know: what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from llmc.artifacts.errors import EnvironmentFault

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG,
    errno.EFBIG, errno.EIO,
)  # fmt: skip


def temporary_beside(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: hidden, in the same folder, this process's own."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def disk_errors(path: Path, option: str = "--output") -> Iterator[None]:
    """Turns a full disk, and a folder that cannot be written, into EnvironmentFault."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
            raise EnvironmentFault(
                f"no space left on the disk of {path.parent} ({free / 1e6:.1f} MB free); nothing was kept. "
                f"Free some space or choose another folder with {option}"
            ) from error
        if error.errno in _REFUSED:
            raise EnvironmentFault(
                f"cannot write {path.parent}: {error.strerror}; choose another path with {option}"
            ) from error
        raise


def require_writable(path: Path, option: str = "--output") -> None:
    """Raises EnvironmentFault unless a file can be written at `path`: asked before the work that would be lost."""
    temporary = temporary_beside(path)
    with disk_errors(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    if path.is_dir():
        raise EnvironmentFault(f"{path} is a folder; name a file with {option}")


def write_file(path: Path, data: bytes, option: str = "--output") -> None:
    """Writes beside the path and renames; raises EnvironmentFault, and what stood there before stays."""
    temporary = temporary_beside(path)
    with disk_errors(path, option):
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
