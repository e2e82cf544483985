"""The C++ compiler of this machine: found, checked, and named for the plan.

Comes in: the name or path that the user gave. Goes out: `Toolchain`, or EnvironmentFault with the remedy. Must not
know: what is compiled.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from llmc.artifacts.errors import EnvironmentFault

#: Older ones lack the x86-64-v3 and v4 levels.
MIN_VERSION = 11


@dataclass(frozen=True)
class Toolchain:
    """`path` of g++ and the first line of its --version."""

    path: str
    version: str


def find_compiler(name: str = "g++") -> Toolchain:
    """Raises EnvironmentFault where there is none, or one that is too old, or another compiler under that name."""
    path = shutil.which(name)
    if path is None:
        raise EnvironmentFault(
            f"the C++ compiler {name!r} is not there (not on PATH, or not executable): building a plan for the cpu "
            f"target needs g++ {MIN_VERSION} or newer (apt install g++). Serving a plan needs none"
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentFault(f"the C++ compiler {path} does not run: {error}") from error
    line = next(iter(done.stdout.splitlines()), "").strip()
    found = re.search(r"\) (\d+)\.\d", line)
    if "clang" in done.stdout or found is None:
        raise EnvironmentFault(
            f"{path} is {line!r}; kernels need GNU g++ {MIN_VERSION} or newer; install it, first on PATH"
        )
    if int(found[1]) < MIN_VERSION:
        raise EnvironmentFault(
            f"{path} is version {line!r}; g++ {MIN_VERSION} or newer is needed; install it, first on PATH"
        )
    return Toolchain(path, line)
