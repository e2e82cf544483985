"""Instruction sets that this machine lacks, as C++ (the headers beside this file): kernels written for them run anyway.

Comes in: a CPU target. Goes out: the target itself where this machine can run it; otherwise one whose code is compiled
for x86-64-v3, from the same kernel sources, with the missing instructions written out. What that shows is that kernels
compute the right numbers; not how fast, nor that the compiler chooses good instructions.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from llmc.artifacts.plan import machine_features
from llmc.profiles import CpuTarget

_FOLDER = Path(__file__).parent
#: g++'s flags for what goes beyond x86-64-v4, and the macro by which a header is asked for it.
_EXTENSIONS = {
    "-mavx512vnni": "EMULATE_AVX512VNNI",
    "-mavx512bf16": "EMULATE_AVX512BF16",
    "-mamx-bf16": "EMULATE_AMX",
}


def runs_here(target: CpuTarget) -> bool:
    """Whether this machine has all that the target needs."""
    return set(target.features) <= machine_features()


def runnable(target: CpuTarget) -> CpuTarget:
    """The target, its instructions emulated where this machine lacks them."""
    if runs_here(target):
        return target
    flags = ["-march=x86-64-v3", "-O1", "-Wno-psabi"]  # numbers alone: compiled fast
    flags += [f"-D{macro}" for flag, macro in _EXTENSIONS.items() if flag in target.isa_flags]
    for header in (_FOLDER / "avx512.h", _FOLDER / "amx.h"):
        digest = hashlib.sha256(header.read_bytes()).hexdigest()[:16]  # objects are cached by their flags
        flags += ["-include", str(header), f"-DEMULATION_{header.stem.upper()}=0x{digest}"]
    return dataclasses.replace(target, isa_flags=tuple(flags))
