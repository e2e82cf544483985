"""C++ compiled as a build compiles kernels, kept between runs, and memory aligned as a plan's: for kernel tests."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from llmc.plugins import INCLUDE_ROOT
from llmc.plugins.cpu import CXX_FLAGS
from llmc.profiles import CpuTarget, load_cpu_target
from tests.emulated import runnable, runs_here

_CACHE = Path(tempfile.gettempdir()) / "llmc-kernel-tests"
_FLOAT = ("x86-64-v3", "x86-64-v4")
#: It differs from x86-64-v4 in the products of INT8 alone (linear/int8.h), which test_wide.py has.
_VNNI = "x86-64-v4-vnni"
#: The levels whose linear layers round inputs to bf16.
BF16_ISAS = ("x86-64-v4-bf16", "x86-64-amx")
_TARGETS = {isa: load_cpu_target(f"cpu:{isa}") for isa in (*_FLOAT, _VNNI, *BF16_ISAS)}
#: Those of the others that this machine can run: results are the same bits on all of them.
ISAS = tuple(isa for isa in _FLOAT if runs_here(_TARGETS[isa]))


def compile_library(text: str, isa: str, *, emulate: bool = True) -> Path:
    """A shared object of one translation unit; raises AssertionError with the compiler's words. With `emulate`, what
    this machine lacks of the level is written out (tests/emulated): then it runs; else it may only be compiled.
    """
    headers = sorted(INCLUDE_ROOT.glob("plugins/**/*.h"))
    target = runnable(_TARGETS[isa]) if emulate else _TARGETS[isa]
    flags = " ".join(target.cxx_flags)
    parts = [text.encode(), flags.encode(), *(h.read_bytes() for h in headers)]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    _CACHE.mkdir(exist_ok=True)
    library = _CACHE / f"{digest[:32]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes that want it one compiles, and the other waits
        if not library.exists():
            _compile(text, target, library)
    return library


def _compile(text: str, target: CpuTarget, library: Path) -> None:
    source, aside = library.with_suffix(".cpp"), library.with_suffix(".partial")
    source.write_text(text)
    flags = [*CXX_FLAGS, "-O3", *target.cxx_flags, f"-I{INCLUDE_ROOT}", "-shared", "-fPIC", "-pthread", "-Wall"]
    flags += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # g++ 12 on its own AVX-512 headers
    done = subprocess.run(["g++", *flags, str(source), "-o", str(aside)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    aside.rename(library)


def aligned(value: np.ndarray) -> np.ndarray:
    """A contiguous copy that starts at a multiple of 64 bytes, as all values of a plan do."""
    memory = np.empty(value.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy
