"""Which instructions a cubin is made of, as NVIDIA's disassembler has it: Triton brings one along.

Comes in: a cubin's bytes. Goes out: its instructions, and how often each stands in it. Must not know: kernels.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from llmc.artifacts.errors import EnvironmentFault

#: An instruction's name behind its address, and behind its predicate if it has one.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)

#: What tensor cores do: warp (HMMA: floats, QMMA: FP8, IMMA: INT8), warp group (..GMMA), tensor memory (UTC..MMA).
_TENSOR_CORES = re.compile(r"(?:[HQIO]G?MMA|UTC\w*MMA)(?:\.|$)")


def disassembler() -> str | None:
    """The path of `nvdisasm`: Triton's own, or that of a CUDA toolkit; None where there is neither."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if own.exists():
            return str(own)
    return shutil.which("nvdisasm")


def listing(code: bytes) -> list[str]:
    """Instructions with their modifiers (HMMA.16816.F32.BF16) in the order of the code.

    Raises EnvironmentFault where there is no disassembler, or it cannot read the cubin.
    """
    tool = disassembler()
    if tool is None:
        raise EnvironmentFault("nvdisasm is not installed: pip install 'llmc[cuda-build]', or the CUDA toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentFault(f"{tool} cannot read the cubin: {(done.stderr or done.stdout).strip()}")
    return _INSTRUCTION.findall(done.stdout)


def instructions(code: bytes) -> Counter[str]:
    """Instruction -> how often it stands in the code. Raises EnvironmentFault as `listing` does."""
    return Counter(listing(code))


def tensor_cores(code: bytes) -> dict[str, int]:
    """Those of `instructions` that tensor cores carry out, in the order of their names."""
    return {name: count for name, count in sorted(instructions(code).items()) if _TENSOR_CORES.match(name)}
