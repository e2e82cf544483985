"""The half of a build that depends on the target: lowering, and code for what was lowered.

Comes in: fused graphs, a target, where code holds them the weights. Goes out: `Lowered`, and a plan's sections of code.
Must not know: checkpoints, passes, plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import HOST_LIBRARY, ShapeProfile
from llmc.builder.cpu.cache import ObjectCache, default_folder
from llmc.builder.cpu.compile import Compiler
from llmc.builder.cpu.emit import emit
from llmc.builder.cpu.lower import lower as lower_for_cpu
from llmc.builder.cpu.program import CpuLowered
from llmc.builder.cpu.toolchain import find_compiler
from llmc.builder.cuda.code import compiled, sections, spills, variants
from llmc.builder.cuda.compile import CudaCompiler, cubin_cache, triton_version
from llmc.builder.cuda.lower import lower as lower_for_cuda
from llmc.builder.cuda.program import CudaLowered
from llmc.builder.ir import Graph
from llmc.builder.lowered import Lowered
from llmc.builder.options import BuildOptions
from llmc.builder.progress import Progress
from llmc.builder.trt.code import build_rank
from llmc.builder.trt.library import tensorrt_with_plugins
from llmc.builder.trt.lower import TrtLowered, TrtRank
from llmc.builder.trt.lower import lower as lower_for_tensorrt
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.recipe import Source, parse
from llmc.profiles import CpuTarget, CudaTarget, TargetDescription, TensorRtTarget, changed_tactics


def lower(
    graphs: Sequence[Graph],
    profile: ShapeProfile,
    target: TargetDescription,
    kv_dtype: str,
    vocab: Sequence[tuple[int, int]],
) -> Lowered:
    """The graphs as programs of the target; `vocab`: (first column, columns) of each rank's logits."""
    if isinstance(target, CpuTarget):
        return lower_for_cpu(graphs, profile, target, kv_dtype, vocab)
    if isinstance(target, CudaTarget):
        return lower_for_cuda(graphs, profile, target, kv_dtype, vocab)
    if isinstance(target, TensorRtTarget):
        return lower_for_tensorrt(graphs, profile, target, kv_dtype, vocab)
    raise UsageError(f"target {target} is not of a kind that plans are written for")


class Backend(ABC):
    """Generates code. Making one finds the compilers, before the minutes of work that would be lost without them."""

    def __init__(self, host: CpuTarget, options: BuildOptions) -> None:
        cache = ObjectCache(default_folder()) if options.cache else None
        self.compiler = Compiler(find_compiler(options.cxx), host, cache, options.workers)
        #: What the user should know of the code that was made.
        self.notes: tuple[str, ...] = ()

    @property
    def toolchain(self) -> str:
        """The C++ compiler's name and version."""
        return self.compiler.toolchain.version

    @property
    def flags(self) -> tuple[str, ...]:
        """What it is told, without paths."""
        return self.compiler.flags

    @property
    def libraries(self) -> Mapping[str, str]:
        """Others that decide about the code, by name: their versions."""
        return {}

    def begin(self) -> None:
        """Starts on what no model changes, beside what the caller does next."""
        self.compiler.begin()

    @abstractmethod
    def code(self, lowered: Lowered, weights: Source, progress: Progress) -> tuple[Lowered, dict[str, bytes]]:
        """What `lower` made, with what compiling has told of it, and its sections of code. `weights`: for code that has
        them in it. Raises EnvironmentFault where a compiler fails.
        """


class CpuBackend(Backend):
    """C++ for this model: a shared object for each rank."""

    def code(self, lowered: Lowered, weights: Source, progress: Progress) -> tuple[Lowered, dict[str, bytes]]:
        """`code/rank<N>.so`."""
        assert isinstance(lowered, CpuLowered)
        sources = [emit(lowered, program.rank) for program in lowered.programs]
        with progress.stage("compile", self.compiler.units(sources)) as done:
            codes = self.compiler.libraries(sources, done)
        return lowered, {program.section: code for program, code in zip(lowered.programs, codes, strict=True)}


class CudaBackend(Backend):
    """Triton kernels for a GPU that need not be here, and a program for each rank that launches them."""

    def __init__(self, target: CudaTarget, options: BuildOptions) -> None:
        super().__init__(target.host, options)
        self.target = target
        self.kernels = CudaCompiler(cubin_cache() if options.cache else None, options.workers)

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of the host's library, and `--tactic=operator.name.key=value` for each number of a file of tactics."""
        return (
            *super().flags,
            *(
                f"--tactic={op}.{name}.{key}={value}"
                for op, choices in changed_tactics(self.target).items()
                for name, numbers in choices.items()
                for key, value in numbers.items()
            ),
        )

    @property
    def libraries(self) -> Mapping[str, str]:
        """Triton, which brings its own assembler."""
        return {"triton": self.kernels.version}

    def code(self, lowered: Lowered, weights: Source, progress: Progress) -> tuple[Lowered, dict[str, bytes]]:
        """`code/rank<N>.json`, `code/<digest>.cubin` for each kernel, and the library of the host."""
        assert isinstance(lowered, CudaLowered)
        with progress.stage("compile", len(variants(lowered)) + 1) as done:
            cubins = compiled(lowered, self.kernels, done)
            made = sections(lowered, cubins)
            made[HOST_LIBRARY] = self.compiler.host_library()
        self.notes = tuple(spills(cubins))
        return lowered, made


class TrtBackend(Backend):
    """Engines that TensorRT builds on the GPU that they are for."""

    def __init__(self, target: TensorRtTarget, options: BuildOptions) -> None:
        super().__init__(target.host, options)
        self.trt = tensorrt_with_plugins(target.sm)
        self.triton = triton_version()

    @property
    def libraries(self) -> Mapping[str, str]:
        """TensorRT, whose engines no other version loads, and Triton, which compiles the plug-ins."""
        return {"tensorrt": str(self.trt.__version__), "triton": self.triton}

    def code(self, lowered: Lowered, weights: Source, progress: Progress) -> tuple[Lowered, dict[str, bytes]]:
        """`code/rank<N>.engine` and `code/rank<N>.json` for each rank, and the library of the host."""
        assert isinstance(lowered, TrtLowered)

        def read(recipe: str) -> np.ndarray:
            return evaluate(parse(recipe), weights)

        ranks: list[TrtRank] = []
        made: dict[str, bytes] = {}
        with progress.stage("compile", len(lowered.programs) + 1) as done:
            for number, program in enumerate(lowered.programs):
                rank, sections_of_rank = build_rank(self.trt, lowered, program, read)
                ranks.append(rank)
                made |= sections_of_rank
                done(number + 1)
            made[HOST_LIBRARY] = self.compiler.host_library()
        self.notes = ("TensorRT times its kernels while it builds: another build gives other bytes",)
        return replace(lowered, programs=tuple(ranks)), made


def backend_for(target: TargetDescription, options: BuildOptions) -> Backend:
    """Raises EnvironmentFault where a compiler is missing."""
    if isinstance(target, CpuTarget):
        return CpuBackend(target, options)
    if isinstance(target, TensorRtTarget):
        return TrtBackend(target, options)
    assert isinstance(target, CudaTarget)
    return CudaBackend(target, options)
