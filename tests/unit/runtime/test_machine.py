"""What the machine allows: processors, memory, and the KV pool that follows from it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import Manifest
from llmc.runtime.kv_size import choose_num_blocks, fixed_bytes
from llmc.runtime.machine import available_memory, usable_cpus
from tests.unit.runtime.fake_engine import write_engine_plan

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


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Blocks of 2 x 32 bytes, 24 for a sequence of 96 tokens, at most 8 sequences."""
    return Plan.open(write_engine_plan(tmp_path_factory.mktemp("engine") / "fake.plan", tp=2)).manifest


def test_the_pool_is_no_larger_than_sequences_can_use(manifest: Manifest) -> None:
    assert choose_num_blocks(manifest, 1 << 40) == 8 * 24
    assert choose_num_blocks(manifest, 1 << 40, max_num_seqs=2) == 2 * 24
    assert choose_num_blocks(manifest, 1 << 40, kv_bytes=1000 * 64) == 1000  # asked for: the rest caches prefixes


def test_the_pool_takes_half_of_what_is_left(manifest: Manifest) -> None:
    fixed = fixed_bytes(manifest)
    assert choose_num_blocks(manifest, fixed + 100 * 64) == 50
    # Half would not hold one sequence: then as much as that needs.
    assert choose_num_blocks(manifest, fixed + 30 * 64) == 24


def test_bytes_are_counted_over_all_ranks(manifest: Manifest) -> None:
    assert choose_num_blocks(manifest, 1 << 40, kv_bytes=30 * 64 + 63) == 30
    assert choose_num_blocks(manifest, 1 << 40, num_blocks=1000) == 1000


def test_what_does_not_fit_is_refused_with_the_sum_and_a_remedy(manifest: Manifest) -> None:
    fixed = fixed_bytes(manifest)
    with pytest.raises(EnvironmentFault) as failure:
        choose_num_blocks(manifest, fixed + 10 * 64, kv_bytes=30 * 64)
    assert "30 blocks x 64 bytes = 1920 bytes" in str(failure.value)
    assert f"beside {fixed} of weights and activations" in str(failure.value)
    assert "1280 bytes more" in str(failure.value)
    assert "--kv-bytes 640 would fit (40 tokens)" in str(failure.value)
    with pytest.raises(EnvironmentFault, match=r"24 blocks .* free some memory"):
        choose_num_blocks(manifest, fixed - 1)
    with pytest.raises(UsageError, match="--kv-bytes 63 holds no block: one of 4 tokens takes 64 bytes"):
        choose_num_blocks(manifest, 1 << 40, kv_bytes=63)


def test_weights_and_activations_of_every_rank_count(manifest: Manifest) -> None:
    larger = dataclasses.replace(
        manifest, ranks=(dataclasses.replace(manifest.ranks[0], arena_bytes=1000), manifest.ranks[1])
    )
    assert fixed_bytes(larger) - fixed_bytes(manifest) == 1000 - manifest.ranks[0].arena_bytes
