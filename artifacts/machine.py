"""What this process may use of the machine, control groups taken into account: for builds as for engines.

Comes in: /proc, /sys/fs/cgroup. Goes out: numbers. Must not know: plans. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
#: Version 1 says "no limit" with a number close to 2**63.
_UNLIMITED = 1 << 60


def usable_cpus(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """How many threads can run at once: the affinity mask, and the quota of every enclosing control group. At least 1.

    A quota is rounded down: threads beyond it would be paused in the middle of a step while the others wait for them,
    and a build's would only take turns, each with memory of its own.
    """
    found = len(os.sched_getaffinity(0))
    for folder in _folders("cpu", proc, cgroups):
        quota = _quota(folder)
        if quota is not None:
            found = min(found, int(quota))
    return max(found, 1)


def _quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")  # version 2
    if text is not None:
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    micros, period_micros = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return micros / period_micros if micros and period_micros and micros > 0 else None


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that can be allocated without swapping: MemAvailable, or what is left of a control group's limit if less.

    File pages count as available on both sides, because the kernel drops them when memory is short.
    """
    found = _meminfo(proc / "meminfo", "MemAvailable")
    for folder in _folders("memory", proc, cgroups):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")  # version 2
        reclaimable = "inactive_file"
        if used is None:
            limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
            reclaimable = "total_inactive_file"
        if limit is not None and used is not None and limit < _UNLIMITED:
            found = min(found, limit - used + _field(folder / "memory.stat", reclaimable))
    return max(found, 0)


def _folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The control group of this process and its parents, in both versions' places, as far as they can be seen."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controllers if (cgroups / controllers).is_dir() else cgroups / controller
        else:
            continue
        folder = root / inner.lstrip("/")
        while folder != root:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield root


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.strip().lstrip("-").isdigit() else None


def _field(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _meminfo(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{path} has no {name}")
