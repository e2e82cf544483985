"""The lock file: which plan, from which checkpoint, by which compiler a team has pinned.

Comes in: manifests. Goes out: `llmc.lock`, JSON with one entry per plan file name. Must not know: how plans are built.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from llmc.artifacts.errors import PlanError
from llmc.artifacts.files import require_writable, write_file
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import CheckpointPin

LOCK_VERSION = 1


class LockEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pinned plan: SHA-256 of its manifest (which holds the hashes of sections), its checkpoint, its compiler."""

    plan: str
    compiler: str
    checkpoint: CheckpointPin


class LockFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a lock file; `plans` maps a plan's file name to its entry."""

    version: int
    plans: dict[str, LockEntry]


def read_lock(path: Path) -> LockFile:
    """Raises PlanError when the file is missing or not a lock file of this version."""
    try:
        lock = msgspec.json.decode(path.read_bytes(), type=LockFile)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such lock file; `llmc build --lock {path}` records one") from None
    except (msgspec.DecodeError, OSError) as error:
        raise PlanError(f"{path}: is not a lock file: {error}; `llmc build --lock {path}` records a new one") from error
    if lock.version != LOCK_VERSION:
        raise PlanError(f"{path}: has version {lock.version}, this llmc reads version {LOCK_VERSION}")
    return lock


def require_lockable(path: Path) -> None:
    """Raises PlanError or EnvironmentFault unless a plan can be recorded in this lock file, which may be a new one."""
    require_writable(path, "--lock")
    if path.exists():
        read_lock(path)


def pin_plan(path: Path, plan: Plan) -> None:
    """Records a plan in a lock file, keeping the other entries."""
    plans = dict(read_lock(path).plans) if path.exists() else {}
    plans[plan.path.name] = LockEntry(plan.digest, plan.manifest.build.compiler, plan.manifest.checkpoint)
    text = msgspec.json.encode(LockFile(LOCK_VERSION, dict(sorted(plans.items()))))
    write_file(path, msgspec.json.format(text, indent=2) + b"\n", "--lock")
