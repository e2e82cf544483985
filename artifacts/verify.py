"""Is this plan what it says, of the checkpoint at hand, and the one that was pinned? Reads files, loads no code.

Comes in: a plan's path, a checkpoint's path, a lock file. Goes out: findings, one a check, each naming what differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import CheckpointError, PlanError
from llmc.artifacts.hashing import sha256_file
from llmc.artifacts.lock import read_lock
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import CheckpointPin


@dataclass(frozen=True)
class Finding:
    """One check: `subject` ("section code/rank0.so"), whether it holds, and what is wrong if not."""

    subject: str
    ok: bool
    detail: str


def check_sections(plan: Plan) -> list[Finding]:
    """Every section against its hash."""
    altered = set(plan.altered_sections())
    return [
        Finding(
            f"section {s.name}",
            s.name not in altered,
            "differs from the manifest: altered or damaged" if s.name in altered else f"blake3 {s.blake3[:16]}",
        )
        for s in plan.manifest.sections
    ]


def check_checkpoint(pin: CheckpointPin, model: Path) -> list[Finding]:
    """Every file that the plan was compiled from against the file of that name in (or at) `model`."""
    if not model.exists():
        raise CheckpointError(f"--model {model}: no such file or folder")
    root = model if model.is_dir() else model.parent
    findings = []
    for file in pin.files:
        path = model if model.is_file() and len(pin.files) == 1 else root / file.name
        findings.append(_check_file(path, file.name, file.size, file.sha256))
    return findings


def _check_file(path: Path, name: str, size: int, sha256: str) -> Finding:
    subject = f"checkpoint file {name}"
    if not path.is_file():
        return Finding(subject, False, f"is missing ({path})")
    if (have := path.stat().st_size) != size:
        return Finding(subject, False, f"has {have} bytes, the plan was compiled from {size}")
    digest = sha256_file(path)
    if digest != sha256:
        return Finding(subject, False, f"has sha256 {digest[:16]}, the plan was compiled from {sha256[:16]}")
    return Finding(subject, True, f"sha256 {sha256[:16]}")


def check_lock(plan: Plan, lock: Path) -> list[Finding]:
    """The plan against its entry in the lock file."""
    entry = read_lock(lock).plans.get(plan.path.name)
    if entry is None:
        return [
            Finding(f"lock {lock.name}", False, f"has no entry for {plan.path.name}; `llmc build --lock` records one")
        ]
    manifest = plan.manifest
    pairs = [
        ("plan digest", plan.digest, entry.plan),
        ("compiler", manifest.build.compiler, entry.compiler),
        ("checkpoint digest", manifest.checkpoint.digest, entry.checkpoint.digest),
    ]
    findings = [
        Finding(f"lock: {what}", have == want, have if have == want else f"is {have}, the lock pins {want}")
        for what, have, want in pairs
    ]
    pinned = {file.name: file for file in entry.checkpoint.files}
    built = {file.name: file for file in manifest.checkpoint.files}
    for name in sorted(pinned.keys() | built.keys()):
        if pinned.get(name) != built.get(name):
            findings.append(Finding(f"lock: checkpoint file {name}", False, "differs between plan and lock"))
    return findings


def verify_plan(
    path: Path, model: Path | None = None, lock: Path | None = None, *, sections: bool = True
) -> list[Finding]:
    """All checks that need no code of the plan, or (without `sections`) those that do not read it whole; raises
    PlanError when it cannot be opened at all.
    """
    plan = Plan.open(path, verify=False)
    findings = check_sections(plan) if sections else []
    if model is not None:
        findings += check_checkpoint(plan.manifest.checkpoint, model)
    if lock is not None:
        findings += check_lock(plan, lock)
    return findings


def require_verified(path: Path, model: Path | None = None, lock: Path | None = None, *, sections: bool = True) -> Plan:
    """The open plan; raises PlanError naming all that differs, EnvironmentFault for a machine that lacks its ISA.
    Without `sections` their hashes are left to whoever loads them.
    """
    bad = [f for f in verify_plan(path, model, lock, sections=sections) if not f.ok]
    if bad:
        raise PlanError(f"{path}: refused: " + "; ".join(f"{f.subject} {f.detail}" for f in bad))
    plan = Plan.open(path, verify=False)
    plan.check_machine()
    return plan
