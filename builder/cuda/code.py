"""A lowered model as sections of a plan: each rank's program, and every kernel once.

Comes in: `CudaLowered`, a compiler of kernels. Goes out: section name -> bytes, the same for the same input. Must not
know: how launches were bound, Triton.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from llmc.artifacts.cuda_program import (
    VERSION,
    Address,
    AllReduce,
    Argument,
    CudaProgram,
    Kernel,
    Launch,
    Product,
    Steps,
    encode_program,
)
from llmc.artifacts.errors import UnsupportedError
from llmc.builder.cuda.compile import CudaCompiler
from llmc.builder.cuda.cubin import SCRATCH_PARAMETERS, Cubin, Resources, resources
from llmc.builder.cuda.program import BoundCall, CudaLowered, CudaRank, StepCode
from llmc.builder.cuda.variant import Variant
from llmc.builder.ir import GraphError

#: Threads of a warp.
_WARP = 32
_ONE = (Product((1,)),)
#: Bytes of an argument: an address, or an i32 or f32.
_POINTER, _NUMBER = 8, 4


def variants(lowered: CudaLowered) -> list[Variant]:
    """What has to be compiled, each once, in the order of first use."""
    calls = [
        launch
        for program in lowered.programs
        for steps in program.steps
        for launch in steps.launches
        if isinstance(launch, BoundCall)
    ]
    return list(dict.fromkeys(call.variant for call in calls))


def compiled(
    lowered: CudaLowered, compiler: CudaCompiler, done: Callable[[int], None] = lambda count: None
) -> dict[Variant, Cubin]:
    """Every kernel. `done` is told how many of `variants` are compiled. Raises what the compiler raises."""
    distinct = variants(lowered)
    cubins = dict(zip(distinct, compiler.cubins(distinct, done), strict=True))
    for variant, cubin in cubins.items():
        if cubin.scratch:
            raise UnsupportedError(
                f"kernel {variant.kernel} for sm_{variant.sm} needs {cubin.scratch} bytes of global scratch a block, "
                "which programs do not give; it must not make tensor descriptors on the device"
            )
    return cubins


def spills(cubins: Mapping[Variant, Cubin]) -> list[str]:
    """What to know of kernels whose registers do not suffice. Generated ones are passed over: they have a stack where
    they work out sines of large numbers.
    """
    stacks: dict[str, int] = {}
    for variant, cubin in cubins.items():
        if variant.source is None:
            stacks[variant.kernel] = max(stacks.get(variant.kernel, 0), resources(cubin.code).local)
    return [
        f"kernel {kernel} keeps {local} bytes of a thread's registers in memory, which is slow: smaller tiles would not"
        for kernel, local in stacks.items()
        if local
    ]


def sections(lowered: CudaLowered, cubins: Mapping[Variant, Cubin]) -> dict[str, bytes]:
    """Programs and kernels, by name."""
    made = {_section(cubin): cubin.code for cubin in cubins.values()}
    for program in lowered.programs:
        made[program.section] = encode_program(rank_program(lowered, program, cubins))
    return made


def _section(cubin: Cubin) -> str:
    return f"code/{hashlib.sha256(cubin.code).hexdigest()[:16]}.cubin"


def rank_program(lowered: CudaLowered, program: CudaRank, cubins: Mapping[Variant, Cubin]) -> CudaProgram:
    """The program of one rank."""
    kernels: dict[Kernel, int] = {}
    tables = {variant: resources(cubin.code) for variant, cubin in cubins.items()}
    steps = tuple(_steps(code, cubins, tables, kernels) for code in program.steps)
    return CudaProgram(
        version=VERSION,
        rank=program.rank,
        tp=program.graph.tp,
        sm=lowered.target.sm,
        kernels=tuple(kernels),
        steps=steps,
        constants=program.constants,
        weights_bytes=program.weights.nbytes,
        shared_bytes=lowered.shared.nbytes,
        arena_bytes=program.arena_bytes,
        kv_block_bytes=program.kv_block_bytes,
        state_slot_bytes=program.state_slot_bytes,
        columns=program.vocab,
        vocab=lowered.vocab_size,
        block_size=lowered.profile.block_size,
        max_num_seqs=lowered.profile.max_num_seqs,
        max_seq_len=lowered.profile.max_seq_len,
    )


def _steps(
    code: StepCode, cubins: Mapping[Variant, Cubin], tables: Mapping[Variant, Resources], kernels: dict[Kernel, int]
) -> Steps:
    """`kernels` numbers those of the rank, and grows; `tables`: what cubins say of themselves."""
    launches: list[Launch | AllReduce] = []
    for bound in code.launches:
        if not isinstance(bound, BoundCall):
            launches.append(bound.what)
            continue
        cubin = cubins[bound.variant]
        kernel = Kernel(
            section=_section(cubin),
            entry=cubin.entry,
            threads=cubin.num_warps * _WARP,
            num_ctas=cubin.num_ctas,
            shared=cubin.shared,
            parameters=cubin.parameters,
        )
        x, y, z = [*bound.call.grid, _ONE, _ONE][:3]
        args = (*bound.args, *(Address("null") for _ in SCRATCH_PARAMETERS))
        _check(f"{bound.node.op} @{bound.node.path}", kernel, args, tables[bound.variant])
        launches.append(
            Launch(
                kernel=kernels.setdefault(kernel, len(kernels)),
                args=args,
                grid=(x, y, z),
                node=f"{bound.node.op} @{bound.node.path}",
            )
        )
    return Steps(code.decode, code.least, code.most, code.rows, tuple(launches))


def _check(where: str, kernel: Kernel, args: Sequence[Argument], table: Resources) -> None:
    """A launch must pass what the cubin's own parameter table takes, as a driver reads as many bytes as that says.
    Raises GraphError, which is a defect of this compiler or of Triton.
    """
    passed = [_POINTER if isinstance(arg, Address) else _NUMBER for arg in args]
    taken = [parameter.size for parameter in table.parameters]
    found = (table.entry, table.threads, taken)
    if found != (kernel.entry, kernel.threads, passed):
        raise GraphError(
            f"{where}: {kernel.entry} is launched with {kernel.threads} threads and arguments of {passed} bytes, and "
            f"its cubin has {table.entry} with {table.threads} threads and parameters of {taken} bytes"
        )
