"""Disks that really are full or broken: the kernel says ENOSPC, EFBIG and EIO, and every answer stays what it was."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmc.runtime.disk_io import DiskIo
from llmc.runtime.host_memory import HostMemory
from llmc.runtime.records import RecordFile
from tests.unit.runtime.scheduling import Run, alone, answer, check, make, on_disk, sequence

ROOT = Path(__file__).resolve().parents[3]
#: Records of 4 KiB: less than the traffic below writes.
_ROOM = 16 * 4096
_MOUNT = f'mount -t tmpfs -o size={_ROOM} none "$1" && exec "$2" -m tests.unit.runtime.test_failing_disk "$1"'


def busy(folder: Path, kind: type[RecordFile] = RecordFile) -> Run:
    """Prompts that push one another out of pool, host memory and disk, and come back."""
    run = make(blocks=16, size=4, tokens=64, memory=HostMemory(4), disk=on_disk(folder, 100, kind, DiskIo))
    assert run.disk is not None
    for turn in range(3):
        for i in range(6):
            prompt = [i] * 40 + [turn]
            name = f"{turn}.{i}"
            run.scheduler.add(sequence(name, prompt, max_tokens=4, ignore_eos=True))
            while run.step():
                pass
            assert answer(run.ended[name]) == alone(prompt, run.ended[name].params, 64)[0]
    run.disk._io._jobs.put(None)
    assert run.disk._io._thread is not None
    run.disk._io._thread.join(60)  # every job has been done
    run.scheduler.schedule()
    check(run.scheduler)
    run.disk.check(100)
    return run


def test_a_disk_with_room_serves_the_same_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = busy(tmp_path)
    assert run.disk is not None
    assert not run.disk.is_off
    assert capsys.readouterr().err == ""


def test_a_disk_that_runs_full() -> None:
    own, folder = ["unshare", "--user", "--map-root-user", "--mount"], "/mnt"
    try:
        subprocess.run([*own, "mount", "-t", "tmpfs", "none", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets nobody mount a file system of its own: {error}")
    command = [*own, "sh", "-c", _MOUNT, "sh", folder, sys.executable]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "off\n"
    (line,) = found.stderr.splitlines()
    assert line.startswith("warning: --kv-disk /mnt: No space left on device; evicted prefixes are not kept there")


def test_a_file_that_may_not_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM, before[1]))  # Python ignores the signal that comes with it
    try:
        run = busy(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.disk is not None
    assert run.disk.is_off
    assert "File too large; evicted prefixes are not kept there any more" in capsys.readouterr().err


class Breaking(RecordFile):
    """After a few records the medium fails: the file is then one whose low addresses the kernel cannot reach (EIO)."""

    writes = 0

    def write(self, number: int, tag: int, parts: Sequence[memoryview]) -> None:
        self.writes += 1
        if self.writes == 5:
            os.dup2(os.open("/proc/self/mem", os.O_RDWR), self.descriptor)
        super().write(number, tag, parts)


def test_a_medium_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = busy(tmp_path, Breaking)
    assert run.disk is not None
    assert run.disk.is_off
    assert "Input/output error; evicted prefixes are not kept there any more" in capsys.readouterr().err


if __name__ == "__main__":  # in a mount namespace of its own, of which the folder is a small file system
    found = busy(Path(sys.argv[1])).disk
    sys.stdout.write("off\n" if found is not None and found.is_off else "on\n")
