"""Kernels of plug-ins as PTX, which TensorRT assembles and launches. Comes in: `Variant`s. Goes out: `Ptx`. Must not
know: TensorRT, Triton.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.cuda.compile import CudaCompiler
from llmc.builder.cuda.cubin import SCRATCH_PARAMETERS, resources
from llmc.builder.cuda.variant import Variant


@dataclass(frozen=True)
class Ptx:
    """`text` has one kernel, `entry`, whose parameters are `parameters`. A block has `threads`, `shared` bytes of
    dynamic shared memory and `static_shared` bytes of it that the code itself names; grid x counts `num_ctas` times.
    """

    text: str
    entry: str
    threads: int
    num_ctas: int
    shared: int
    static_shared: int
    parameters: tuple[str, ...]


def compile_ptx(variants: Sequence[Variant]) -> list[Ptx]:
    """One for each variant. Raises EnvironmentFault without Triton, UnsupportedError for a kernel that needs scratch
    memory.
    """
    return [
        Ptx(
            text=without_scratch(text, cubin.entry, cubin.scratch),
            entry=cubin.entry,
            threads=32 * cubin.num_warps,
            num_ctas=cubin.num_ctas,
            shared=cubin.shared,
            static_shared=resources(cubin.code).shared,
            parameters=cubin.parameters[: -len(SCRATCH_PARAMETERS)],
        )
        for cubin, text in CudaCompiler().with_ptx(variants)
    ]


def without_scratch(text: str, entry: str, scratch: int) -> str:
    """The PTX without the pointers to scratch memory that Triton declares last, and that nobody would pass. Raises
    UnsupportedError where the kernel uses them.
    """
    head = re.search(rf"(\.entry\s+{re.escape(entry)}\s*\()([^)]*)(\))", text)
    if head is None:
        raise UnsupportedError(
            f"the PTX of {entry} declares no such kernel; this is a defect of llmc, please report it"
        )
    declared = [parameter.strip() for parameter in head[2].split(",")]
    kept, dropped = declared[: -len(SCRATCH_PARAMETERS)], declared[-len(SCRATCH_PARAMETERS) :]
    names = [parameter.split()[-1] for parameter in dropped]
    if scratch or any(len(re.findall(rf"\b{re.escape(name)}\b", text)) != 1 for name in names):
        raise UnsupportedError(f"{entry} needs scratch memory, and TensorRT gives a plug-in's kernel none")
    return text[: head.start(2)] + "\n\t" + ",\n\t".join(kept) + "\n" + text[head.end(2) :]
