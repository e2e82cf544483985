"""What a process may use of the machine: processors and memory, in control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.artifacts.machine import available_memory, usable_cpus

MB = 1 << 20


class Machine:
    """A /proc and a /sys/fs/cgroup made of files."""

    def __init__(self, root: Path, groups: str) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: {900 * 1024} kB\nMemAvailable: {800 * 1024} kB\n", root)
        self.write("proc/self/cgroup", groups, root)
        self.cgroups.mkdir()

    def write(self, path: str, text: str, root: Path | None = None) -> None:
        file = (root or self.cgroups) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def memory(self) -> int:
        return available_memory(self.proc, self.cgroups)

    @property
    def cpus(self) -> int:
        return usable_cpus(self.proc, self.cgroups)


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_without_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/app\n")
    assert (machine.memory, machine.cpus) == (800 * MB, 8)


def test_version_2_limits_of_any_level_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/pod/app\n")
    machine.write("pod/cpu.max", "350000 100000\n")
    machine.write("pod/app/cpu.max", "max 100000\n")
    machine.write("pod/memory.max", f"{500 * MB}\n")
    machine.write("pod/memory.current", f"{300 * MB}\n")
    machine.write("pod/memory.stat", f"anon 1\ninactive_file {50 * MB}\n")
    machine.write("pod/app/memory.max", "max\n")
    assert (machine.memory, machine.cpus) == (250 * MB, 3)


def test_version_2_in_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.write("cpu.max", "50000 100000\n")
    machine.write("memory.max", f"{100 * MB}\n")
    machine.write("memory.current", f"{200 * MB}\n")
    assert (machine.memory, machine.cpus) == (0, 1)


def test_version_1(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n")
    # The path inside is the host's: a container sees its own limits at the root.
    machine.write("memory/memory.limit_in_bytes", f"{400 * MB}\n")
    machine.write("memory/memory.usage_in_bytes", f"{100 * MB}\n")
    machine.write("memory/memory.stat", f"total_inactive_file {20 * MB}\n")
    machine.write("cpu,cpuacct/cpu.cfs_quota_us", "200000\n")
    machine.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert (machine.memory, machine.cpus) == (320 * MB, 2)
    machine.write("memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    assert (machine.memory, machine.cpus) == (800 * MB, 8)


def test_this_machine() -> None:
    assert available_memory() > 0
    assert usable_cpus() >= 1
