"""The compiler's driver: what it makes, that it makes the same again, and what it says when it cannot."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.builder.build import ABI_VERSION
from llmc.builder.cpu import compile as cpu_compile
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.cpu.compile import Compiler
from llmc.builder.cpu.emit import emit
from llmc.builder.cpu.lower import lower
from llmc.builder.cpu.toolchain import Toolchain, find_compiler
from llmc.plugins import INCLUDE_ROOT
from llmc.profiles import load_target
from llmc.runtime import native
from tests.unit.builder.test_lower import PROFILE, VOCAB, graph

TARGET = load_target("cpu")


@pytest.fixture(scope="module")
def sources() -> list[dict[str, str]]:
    lowered = lower([graph(0), graph(1)], PROFILE, TARGET, "bf16", VOCAB)
    return [emit(lowered, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_compiler()


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> ObjectCache:
    return ObjectCache(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def code(sources, toolchain: Toolchain, objects: ObjectCache) -> list[bytes]:
    return Compiler(toolchain, TARGET, objects).libraries(sources)


def test_as_many_units_at_once_as_this_process_may_run(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compile, "usable_cpus", lambda: 3)
    assert Compiler(toolchain, TARGET).workers == 3
    assert Compiler(toolchain, TARGET, workers=5).workers == 5


def elf(code: bytes, tmp_path: Path, *options: str) -> str:
    path = tmp_path / "code.so"
    path.write_bytes(code)
    return subprocess.run(["readelf", "-W", *options, str(path)], capture_output=True, text=True, check=True).stdout


def test_libraries_need_only_what_every_machine_has(code: list[bytes], tmp_path: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", elf(code[0], tmp_path, "-d"))
    assert "libc.so.6" in needed
    assert set(needed) <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def test_what_was_begun_before_the_sources_were_known_is_the_same_code(sources, toolchain: Toolchain, code) -> None:
    compiler = Compiler(toolchain, TARGET)
    compiler.begin()
    assert compiler.libraries(sources) == code


def test_libraries_export_the_abi_and_nothing_else(code: list[bytes], tmp_path: Path) -> None:
    lines = elf(code[0], tmp_path, "--dyn-syms").splitlines()
    exported = {line.split()[-1] for line in lines if re.search(r" (GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ", line)}
    declared = re.findall(r"\b(llmc_\w+)\(", (INCLUDE_ROOT / "plugins/cpu/abi.h").read_text())
    assert exported == set(declared)
    assert len(exported) == 8


def test_libraries_hold_no_paths_and_no_build_id(code: list[bytes], tmp_path: Path) -> None:
    assert str(INCLUDE_ROOT).encode() not in code[0]
    assert b"llmc-build-" not in code[0]
    sections = elf(code[0], tmp_path, "-S")
    assert ".note.gnu.build-id" not in sections
    assert ".symtab" not in sections


def test_the_same_sources_give_the_same_bytes_without_a_cache(
    sources, code: list[bytes], toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "another" / "folder"
    elsewhere.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    assert Compiler(toolchain, TARGET, None, workers=1).libraries(sources) == code
    assert list(elsewhere.iterdir()) == []


def test_what_was_compiled_once_is_not_compiled_again(
    sources, code: list[bytes], toolchain: Toolchain, objects: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(toolchain, TARGET, objects)
    ran: list[str] = []
    run = Compiler._run
    monkeypatch.setattr(
        Compiler, "_run", lambda self, args, folder, name: (ran.append(name), run(self, args, folder, name))
    )
    assert compiler.libraries(sources) == code
    assert ran == ["code.so", "code.so"]
    changed = [{**sources[0], "step_0.cpp": sources[0]["step_0.cpp"] + "// more\n"}]
    compiler.libraries(changed)
    assert ran[2:] == ["step_0.cpp", "code.so"]


def test_progress_counts_every_unit(sources, code: list[bytes], toolchain: Toolchain, objects: ObjectCache) -> None:
    counts: list[int] = []
    compiler = Compiler(toolchain, TARGET, objects)
    compiler.libraries(sources, counts.append)
    assert counts[-1] == compiler.units(sources) == 10
    assert counts == sorted(counts)


@pytest.mark.parametrize("change", ["flags", "version", "path", "header", "text"])
def test_the_cache_key_covers_everything(change: str, sources, toolchain: Toolchain) -> None:
    compiler, files = Compiler(toolchain, TARGET), dict(sources[0])
    before = compiler._key("step_0.cpp", files)
    if change == "flags":
        compiler = Compiler(toolchain, load_target("cpu:x86-64-v4"))
    elif change == "version":
        compiler = Compiler(Toolchain(toolchain.path, "g++ 99.1"), TARGET)
    elif change == "path":  # a script that calls g++ with other flags says the same version
        compiler = Compiler(Toolchain("/elsewhere/g++", toolchain.version), TARGET)
    elif change == "header":
        files["engine.h"] += "\n"
    else:
        files["step_0.cpp"] += "\n"
    assert compiler._key("step_0.cpp", files) != before


def test_a_compile_error_shows_the_first_error_and_keeps_the_source(sources, toolchain: Toolchain) -> None:
    broken = {
        **sources[0],
        "step_0.cpp": '#include "engine.h"\nint f() { return nonsense; }\nint g() { return more; }\n',
    }
    with pytest.raises(
        EnvironmentFault, match=r"step_0\.cpp:2:\d+: error: 'nonsense'.*kept in (.*step_0\.cpp)"
    ) as caught:
        Compiler(toolchain, TARGET).libraries([broken])
    kept = Path(re.search(r"kept in (.*)\)", str(caught.value))[1])  # type: ignore[index]
    assert kept.read_text() == broken["step_0.cpp"]
    assert "more" not in str(caught.value)


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'g++ (Debian 10.2.1-6) 10.2.1 20210110'", r"10\.2\.1.*g\+\+ 11 or newer is needed"),
        ("echo 'Apple clang version 15.0.0'", "kernels need GNU g"),
        ("echo hello", "'hello'; kernels need GNU g"),
        ("exit 3", "does not run"),
    ],
)
def test_other_compilers_are_refused(script: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=reason):
        find_compiler(fake_compiler(tmp_path / "cc", script))


def test_a_missing_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match=r"C\+\+ compiler 'g\+\+' is not there.*apt install"):
        find_compiler()


def test_a_killed_compiler_is_not_called_a_defect(sources, tmp_path: Path) -> None:
    path = fake_compiler(
        tmp_path / "cc", "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1"
    )
    with pytest.raises(EnvironmentFault, match="it was killed: memory may be short"):
        Compiler(Toolchain(path, "g++ (x) 12.1"), TARGET, workers=1).libraries(sources)


def test_a_cache_that_cannot_be_written_says_where(sources, toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"cannot (read|write) the cache .*file/objects.*XDG_CACHE_HOME"):
        Compiler(toolchain, TARGET, ObjectCache(tmp_path / "file" / "objects")).libraries(sources[:1])


def test_the_oldest_objects_go_when_the_cache_is_full(tmp_path: Path) -> None:
    import os

    cache = ObjectCache(tmp_path, limit=250)
    for number, key in enumerate("abc"):
        cache.put(key, bytes(100))
        os.utime(tmp_path / f"{key}.o", (number, number))
    assert cache.get("a") == bytes(100)  # now the newest
    cache.prune()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.o", "c.o"]
    assert cache.get("b") is None


def test_python_and_c_agree_on_the_abi() -> None:
    text = (INCLUDE_ROOT / "plugins/cpu/abi.h").read_text()
    assert f"#define LLMC_ABI_VERSION {ABI_VERSION}\n" in text
    assert native.ABI_VERSION == ABI_VERSION
