"""What became of a plan's kernels: registers, memory, stack and tensor-core instructions of each cubin.

Comes in: the programs of a plan's ranks, its cubins. Goes out: `KernelReport`s, most launched first. Needs no Triton;
with NVIDIA's disassembler it knows the instructions too. Must not know: where programs and cubins lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmc.artifacts.cuda_program import CudaProgram, Launch
from llmc.builder.cuda.cubin import resources
from llmc.builder.cuda.sass import disassembler, tensor_cores


@dataclass(frozen=True)
class KernelReport:
    """One cubin. `launches`: how often all ranks' steps launch it, each kind of step once; `operators`: what for.
    `registers` a thread, `shared` bytes a block, static and dynamic; `stack` bytes a thread, where registers spill to,
    and where sines of large numbers are worked out. `tensor_cores`: instruction -> how often it stands in the code;
    None where nothing could disassemble it.
    """

    section: str
    entry: str
    launches: int
    operators: tuple[str, ...]
    threads: int
    registers: int
    shared: int
    stack: int
    tensor_cores: Mapping[str, int] | None


def kernel_reports(programs: Sequence[CudaProgram], cubin: Callable[[str], bytes]) -> list[KernelReport]:
    """`cubin` gives the bytes of a section. Raises PlanError for a section that is no cubin."""
    launches: Counter[str] = Counter()
    operators: dict[str, set[str]] = {}
    for program in programs:
        for steps in program.steps:
            for launch in steps.launches:
                if isinstance(launch, Launch):
                    section = program.kernels[launch.kernel].section
                    launches[section] += 1
                    operators.setdefault(section, set()).add(launch.node.partition(" ")[0])
    shared = {kernel.section: kernel.shared for program in programs for kernel in program.kernels}
    known = disassembler() is not None
    reports = []
    for section, count in launches.most_common():
        code = cubin(section)
        found = resources(code)
        reports.append(
            KernelReport(
                section=section,
                entry=found.entry,
                launches=count,
                operators=tuple(sorted(operators[section])),
                threads=found.threads,
                registers=found.registers,
                shared=found.shared + shared[section],
                stack=found.local,
                tensor_cores=tensor_cores(code) if known else None,
            )
        )
    return reports
