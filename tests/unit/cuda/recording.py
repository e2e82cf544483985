"""A small plan, and scripts that run it on a driver which only records (fake_driver.c)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llmc
from llmc.builder.report import BuildReport
from tests.models import save_checkpoint

HERE = Path(__file__).parent
PROFILE = "token_ranges: [{min: 1, max: 32}]\nmax_num_seqs: 8\nmax_seq_len: 64\n"


def compile_driver(folder: Path) -> Path:
    """The folder, with the recording libcuda.so.1."""
    source = ["-Wall", "-Werror", "-O1", str(HERE / "fake_driver.c"), "-o", str(folder / "libcuda.so.1"), "-ldl"]
    subprocess.run(["gcc", "-shared", "-fPIC", *source], check=True)
    return folder


def compile_nccl(folder: Path) -> Path:
    """The folder, with a package in it that stands in the place of nvidia-nccl-cu13: for PYTHONPATH."""
    library = folder / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    (folder / "nvidia/__init__.py").touch()
    source = ["-Wall", "-Werror", "-O1", str(HERE / "fake_nccl.c"), "-o", str(library), "-ldl"]
    subprocess.run(["gcc", "-shared", "-fPIC", *source], check=True)
    return folder


def build_small(folder: Path, target: str, tp: int = 1) -> BuildReport:
    """Builds the plan `folder`/x.plan of a small model, `folder`/tiny: the report, of an engine that nobody asked
    anything, whatever this machine has.
    """
    profile = folder / "small.yaml"
    profile.write_text(PROFILE)
    model = save_checkpoint(folder / "tiny", "llama")
    return llmc.build(
        model, folder / "x.plan", precision="bf16", target=target, tp=tp, profile=str(profile), self_test=False
    )


def run(script: str, arguments: list[str], driver: Path, **machine: str) -> subprocess.CompletedProcess[str]:
    """`machine`: what the driver shows, and where it writes what it is told (FAKE_CUDA_...)."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), **machine}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def lines_of(log: Path) -> list[list[str]]:
    """What the driver was told, a call a line."""
    return [line.split() for line in log.read_text().splitlines()]
