"""Runs g++: sources to a shared object that needs nothing but libc and libm where it is loaded.

Comes in: each library's sources, the target's flags, a toolchain. Goes out: each library's bytes. The same input gives
the same bytes: no paths, no times, no build id go in. Must not know: graphs, kernels.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.machine import usable_cpus
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.cpu.toolchain import Toolchain
from llmc.plugins import INCLUDE_ROOT
from llmc.plugins.cpu import CXX_FLAGS
from llmc.profiles import CpuTarget

_FLAGS = (
    *CXX_FLAGS,
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-gnu-unique",
    "-fno-ident",
    "-frandom-seed=llmc",
    "-ffunction-sections",
    "-Wall",
    "-Wno-unused-function",
)
_LINK = (
    "-shared",
    "-pthread",
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--build-id=none",
    "-Wl,--gc-sections",
    "-Wl,--hash-style=gnu",
    "-Wl,--version-script=exports.map",
    "-Wl,-z,relro,-z,now,-z,defs",
    "-s",
)
#: Only the ABI is visible, nothing of libstdc++.
_EXPORTS = "{ global: llmc_*; local: *; };\n"
#: The same in every library, beside the generated sources.
_COMMON = {
    "entry.cpp": (Path(__file__).parent / "entry.cpp").read_text(),
    "machine.cpp": (Path(__file__).parent / "machine.cpp").read_text(),
    "sampler.cpp": '#include "plugins/sampler/cpu.h"\n',
}


#: Those of them that include nothing generated.
_ALONE = ("machine.cpp", "sampler.cpp")
#: The system's headers that kernels include: precompiled, a fifth of each unit's time less.
_SYSTEM = "".join(f"#include <{name}>\n" for name in ("immintrin.h", "algorithm", "atomic", "cmath", "cstring"))

#: What g++ sees of the environment; others (CPATH, GCC_COMPARE_DEBUG, ...) would change the code or the output.
_ENVIRONMENT = frozenset({"PATH", "TMPDIR", "HOME", "LD_LIBRARY_PATH"})


#: Ours are between quotes and relative to the sources or to INCLUDE_ROOT, the system's between angle brackets.
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class _Unit:
    """A translation unit: the file `name` in `folder`."""

    folder: Path
    name: str

    @property
    def target(self) -> Path:
        """Its object."""
        return self.folder / f"{self.name}.o"


class Compiler:
    """Compiles libraries for one target. `cache` None: everything is compiled anew. `workers` run at once."""

    def __init__(
        self,
        toolchain: Toolchain,
        target: CpuTarget,
        cache: ObjectCache | None = None,
        workers: int | None = None,
    ) -> None:
        self.toolchain, self.target, self.cache = toolchain, target, cache
        self.workers = workers or usable_cpus()
        self._begun: Future[dict[str, bytes]] | None = None
        self._headers: tempfile.TemporaryDirectory[str] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """What the manifest records: all that decides about the code, no paths."""
        return (*_FLAGS, *self.target.cxx_flags)

    def begin(self) -> None:
        """Starts on what no model changes, beside what the caller does next; `libraries` takes it over."""
        pool = ThreadPoolExecutor(1)
        self._begun = pool.submit(self._common)
        pool.shutdown(wait=False)

    def _common(self) -> dict[str, bytes]:
        """Their objects by their keys; headers are precompiled first, unless the cache has these: then it has more."""
        keys = {name: self._key(name, _COMMON) for name in _ALONE}
        if self.cache is None or not all(map(self.cache.get, keys.values())):
            self._headers = tempfile.TemporaryDirectory(prefix="llmc-headers-")
            folder = Path(self._headers.name)
            (folder / "system.h").write_text(_SYSTEM)
            self._run([*self.flags, "-x", "c++-header", "system.h"], folder, "system.h")
        folder, result = Path(tempfile.mkdtemp(prefix="llmc-build-")), {}
        for name, key in keys.items():
            (folder / name).write_text(_COMMON[name])
            unit = _Unit(folder, name)
            self._compile(key, unit)
            result[key] = unit.target.read_bytes()
        shutil.rmtree(folder)
        return result

    def libraries(
        self, sources: Sequence[Mapping[str, str]], done: Callable[[int], None] = lambda count: None
    ) -> list[bytes]:
        """One shared object for each set of sources (name -> text; `.cpp` files are compiled, others included).

        `done` is told how many of `units(sources)` are complete. Raises EnvironmentFault with the compiler's first
        error and the file where the source was kept.
        """
        return self._libraries([{**_COMMON, **files} for files in sources], done)

    def host_library(self) -> bytes:
        """The shared object beside kernels that run elsewhere: the sampler without an engine. Raises as above."""
        files = {name: _COMMON[name] for name in _ALONE}
        host = (Path(__file__).parent / "host.cpp").read_text()
        return self._libraries([{**files, "host.cpp": host}], lambda count: None)[0]

    def _libraries(self, sources: Sequence[Mapping[str, str]], done: Callable[[int], None]) -> list[bytes]:
        complete = [{**files, "exports.map": _EXPORTS} for files in sources]
        try:
            folder = Path(tempfile.mkdtemp(prefix="llmc-build-"))
            result = self._build(folder, complete, done)  # where this fails, the sources stay for whoever reads why
            shutil.rmtree(folder)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write temporary files in {tempfile.gettempdir()}: {error.strerror}; TMPDIR names another"
            ) from error
        return result

    def _build(self, folder: Path, libraries: Sequence[Mapping[str, str]], done: Callable[[int], None]) -> list[bytes]:
        for number, files in enumerate(libraries):
            (folder / str(number)).mkdir()
            for name, text in files.items():
                (folder / str(number) / name).write_text(text)
        self._objects(folder, libraries, done)
        if self._headers is not None:
            self._headers.cleanup()
            self._headers = None
        result = [self._link(folder / str(number)) for number in range(len(libraries))]
        if self.cache is not None:
            self.cache.prune()
        return result

    def _objects(self, folder: Path, libraries: Sequence[Mapping[str, str]], done: Callable[[int], None]) -> None:
        """Compiles every unit to an object beside it; what several libraries have in common, once."""
        units: dict[str, list[_Unit]] = {}
        for number, files in enumerate(libraries):
            for name in files:
                if name.endswith(".cpp"):
                    units.setdefault(self._key(name, files), []).append(_Unit(folder / str(number), name))

        begun = self._begun.result() if self._begun is not None else {}

        def compile_one(key: str) -> int:
            first, *others = units[key]
            if key in begun:
                first.target.write_bytes(begun[key])
            else:
                self._compile(key, first)
            for other in others:
                shutil.copyfile(first.target, other.target)
            return len(units[key])

        count = 0
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(compile_one, key) for key in units]
            try:
                for future in as_completed(futures):
                    count += future.result()
                    done(count)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    @staticmethod
    def units(sources: Sequence[Mapping[str, str]]) -> int:
        """How many translation units these sources are."""
        return sum(name.endswith(".cpp") for files in sources for name in {**_COMMON, **files})

    def _compile(self, key: str, unit: _Unit) -> None:
        stored = self.cache.get(key) if self.cache is not None else None
        if stored is not None:
            unit.target.write_bytes(stored)
            return
        maps = [f"-ffile-prefix-map={unit.folder}=.", f"-ffile-prefix-map={INCLUDE_ROOT}=llmc"]
        places = [*maps, f"-I{INCLUDE_ROOT}", "-I."]
        if self._headers is not None:
            places += ["-include", str(Path(self._headers.name) / "system.h")]
        self._run([*self.flags, *places, "-c", unit.name, "-o", unit.target.name], unit.folder, unit.name)
        if self.cache is not None:
            self.cache.put(key, unit.target.read_bytes())

    def _link(self, folder: Path) -> bytes:
        objects = sorted(path.name for path in folder.glob("*.o"))
        self._run([*objects, *_LINK, "-o", "code.so"], folder, "code.so")
        return (folder / "code.so").read_bytes()

    def _key(self, name: str, files: Mapping[str, str]) -> str:
        """Over the compiler, the flags, the unit's text, and every header that it includes, however far down. The
        compiler's path too: a script that calls g++ with flags of its own says that it is the same version.
        """
        parts = [self.toolchain.path, self.toolchain.version, *self.flags]
        wanted, seen = [name], set()
        while wanted:
            file = wanted.pop()
            if file not in seen:
                seen.add(file)
                text = files[file] if file in files else _header(file)
                parts.append(f"{file}\0{text}")
                wanted += _INCLUDE.findall(text)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _run(self, arguments: Sequence[str], folder: Path, name: str) -> None:
        env = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT} | {"LC_ALL": "C"}
        try:
            done = subprocess.run(
                [self.toolchain.path, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise EnvironmentFault(f"cannot run {self.toolchain.path}: {error.strerror}") from error
        if done.returncode != 0:
            raise EnvironmentFault(_failure(self.toolchain, name, folder, done))


@cache
def _header(name: str) -> str:
    return (INCLUDE_ROOT / name).read_text()


def _failure(toolchain: Toolchain, name: str, folder: Path, done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|No space|Killed", line)] or lines or ["no message"]
    if done.returncode < 0 or "Killed" in done.stderr:
        reason = "it was killed: memory may be short; `taskset -c 0 llmc build ...` compiles one file at a time"
    elif "No space left" in done.stderr:
        reason = f"the disk of {folder} is full"
    else:
        reason = "this is a defect of llmc or of the compiler, please report it with the source"
    return f"{toolchain.path} fails on {name}: {errors[0].strip()}; {reason} (kept in {folder / name})"
