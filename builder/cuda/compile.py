"""Compiles kernels to cubins, ahead of time: needs Triton, but neither a GPU, a driver nor PyTorch.

Comes in: `Variant`s. Goes out: a `Cubin` for each. The same variant gives the same bytes, wherever and whenever: no
paths, no times go in. Must not know: graphs, kernels, Triton itself, which only `worker.py` imports.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import PIPE
from typing import IO

import msgspec

from llmc.artifacts.errors import EnvironmentFault, UnsupportedError
from llmc.artifacts.machine import usable_cpus
from llmc.builder.cpu.cache import ObjectCache, default_folder
from llmc.builder.cuda.cubin import Cubin
from llmc.builder.cuda.variant import Variant
from llmc.builder.cuda.worker import FP_FUSION, PTX_VERSION, Failure, Success, read, write
from llmc.plugins.cuda.tiles import SHARED_MEMORY

#: Raised by one whenever what a `Cubin` holds, or how one is compiled, changes.
_CACHE_FORMAT = "1"
#: What changes the output or code of Triton and its tools and is none of the options (the rest is set or left out).
_IGNORED = ("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "DISABLE_PTXAS_OPT", "USE_IR_LOC")


def triton_version() -> str:
    """The installed version. Raises EnvironmentFault where there is none."""
    if importlib.util.find_spec("triton") is None:
        raise EnvironmentFault(
            "cuda targets need Triton to compile kernels, and it is not installed: pip install 'llmc[cuda-build]'"
        )
    return importlib.metadata.version("triton")


def cubin_cache() -> ObjectCache:
    """Where cubins are kept between builds."""
    return ObjectCache(default_folder("cubins"), suffix=".cubin")


class CudaCompiler:
    """Compiles for any architecture. `cache` None: everything is compiled anew. `workers` processes run at once."""

    def __init__(self, cache: ObjectCache | None = None, workers: int | None = None) -> None:
        self.cache = cache
        self.workers = workers or usable_cpus()
        self.version = triton_version()

    def cubins(self, variants: Sequence[Variant], done: Callable[[int], None] = lambda count: None) -> list[Cubin]:
        """One for each variant, equal ones compiled once; `done` is told how many distinct ones are complete.

        Raises EnvironmentFault with the compiler's message and the kernel, UnsupportedError for a kernel that needs
        more shared memory than the architecture has.
        """
        distinct = list(dict.fromkeys(variants))
        keys = {variant: self.key(variant) for variant in distinct}
        made = {variant: cubin for variant in distinct if (cubin := self._stored(keys[variant])) is not None}
        done(len(made))
        missing = [variant for variant in distinct if variant not in made]
        if missing:
            with tempfile.TemporaryDirectory(prefix="llmc-triton-") as folder:
                for variant, success in self._compile(missing, folder, lambda count: done(len(distinct) - count)):
                    made[variant] = success.cubin
                    if self.cache is not None:
                        self.cache.put(keys[variant], msgspec.msgpack.encode(success.cubin))
            if self.cache is not None:
                self.cache.prune()
        for variant, cubin in made.items():
            _check_memory(variant, cubin)
        return [made[variant] for variant in variants]

    def with_ptx(self, variants: Sequence[Variant]) -> list[tuple[Cubin, str]]:
        """As `cubins`, compiled anew, each beside its PTX."""
        distinct = list(dict.fromkeys(variants))
        with tempfile.TemporaryDirectory(prefix="llmc-triton-") as folder:
            made = dict(self._compile(distinct, folder, lambda left: None))
        for variant, success in made.items():
            _check_memory(variant, success.cubin)
        return [(made[variant].cubin, made[variant].ptx) for variant in variants]

    def key(self, variant: Variant) -> str:
        """What its cubin is kept under."""
        return variant.key(_CACHE_FORMAT, self.version, str(PTX_VERSION), str(FP_FUSION))

    def _stored(self, key: str) -> Cubin | None:
        data = self.cache.get(key) if self.cache is not None else None
        return None if data is None else msgspec.msgpack.decode(data, type=Cubin)

    def _compile(
        self, variants: Sequence[Variant], folder: str, left: Callable[[int], None]
    ) -> list[tuple[Variant, Success]]:
        """Each worker takes the next variant when it has answered; `left` is told how many are not complete."""
        waiting = iter(variants)  # shared: each takes what is next
        made: list[tuple[Variant, Success]] = []

        def drive() -> None:
            with worker_process(folder) as worker:
                try:
                    for variant in waiting:
                        made.append((variant, worker.compile(variant)))
                        left(len(variants) - len(made))
                except BaseException:
                    list(waiting)  # the others stop after what they are at
                    raise

        count = min(self.workers, len(variants))
        with ThreadPoolExecutor(count) as pool:
            for future in [pool.submit(drive) for _ in range(count)]:
                future.result()
        return made


@contextmanager
def worker_process(folder: str) -> Iterator[WorkerProcess]:
    """A process of `worker.py`; `folder` is for Triton's own cache, which goes when the build ends."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_IGNORED)}
    environment |= {"TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1", "LC_ALL": "C"}
    command = [sys.executable, "-m", "llmc.builder.cuda.worker"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, env=environment) as process,
    ):
        yield WorkerProcess(process, log)


@dataclass(frozen=True)
class WorkerProcess:
    """Compiles one variant after the other."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def compile(self, variant: Variant) -> Success:
        """Raises EnvironmentFault with what went wrong."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        try:
            write(requests, msgspec.msgpack.encode(variant))
            answer = read(answers)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise EnvironmentFault(f"{_about(variant)}: the process that compiles has died: {self._last_words()}")
        result = msgspec.msgpack.decode(answer, type=Success | Failure)
        if isinstance(result, Failure):
            reason = " ".join(result.message.split())
            raise EnvironmentFault(
                f"{_about(variant)}: {reason[-600:]}; this is a defect of llmc or of Triton, please report it"
            )
        return result

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.wait()}; memory may be short"


def _check_memory(variant: Variant, cubin: Cubin) -> None:
    if cubin.shared > (most := SHARED_MEMORY[variant.sm]):
        raise UnsupportedError(
            f"kernel {variant.kernel} needs {cubin.shared} bytes of shared memory, a block on sm_{variant.sm} "
            f"has {most}: its tactics must name smaller tiles or fewer stages"
        )


def _about(variant: Variant) -> str:
    constants = ", ".join(f"{name}={value}" for name, value in variant.constexprs)
    return f"Triton fails on {variant.kernel} for sm_{variant.sm} ({constants})"
