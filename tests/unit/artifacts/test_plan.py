"""The plan file: alignment, reproducible bytes, and every kind of damage refused with one clear error."""

import errno
import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from llmc.artifacts import plan as plan_module
from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.artifacts.plan import MANIFEST, PAGE, Plan, PlanWriter
from llmc.artifacts.schema import (
    FORMAT_VERSION,
    BuildInfo,
    CheckpointPin,
    Manifest,
    ModelInfo,
    ShapeProfile,
    SourceFile,
    Target,
    TokenRange,
)

SECTIONS = {
    "code/rank0.so": b"\x7fELF" + bytes(100),
    "weights/rank0.bin": os.urandom(3 * PAGE + 5),
    "config.json": b"{}",
}


def manifest(**changes: object) -> Manifest:
    base = Manifest(
        format=FORMAT_VERSION,
        checkpoint=CheckpointPin("d" * 64, "huggingface", (SourceFile("config.json", 2, "a" * 64),)),
        target=Target("cpu", "x86-64-v3"),
        model=ModelInfo("tiny", "llama", "LlamaForCausalLM", 10, 300, 128, (2,), 1, False),
        profile=ShapeProfile("chat", (TokenRange(1, 1, 1),), 4, 128, 16),
        build=BuildInfo("llmc 0.1.0", "g++", (), "fp32", "f32", 1),
        ranks=(),
        shared_weights="weights/shared.bin",
        shared_bytes=0,
        comm_bytes=0,
        abi=1,
        sections=(),
    )
    return replace(base, **changes)


def write(path: Path, **changes: object) -> Path:
    with PlanWriter(path) as writer:
        for name, data in SECTIONS.items():
            writer.add(name, data)
        writer.seal(manifest(**changes))
        writer.amend({"golden.json": b'{"prompts": []}'})
        return writer.publish()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "engine.plan")


def test_sections_are_page_aligned_views(path: Path) -> None:
    plan = Plan.open(path)
    for name, data in SECTIONS.items():
        assert bytes(plan.section(name)) == data
        assert plan.entry(name).offset % PAGE == 0
    assert [s.name for s in plan.manifest.sections] == [*SECTIONS, "golden.json"]


def test_any_zip_tool_can_list_and_check_it(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [*SECTIONS, "golden.json", MANIFEST]
        assert all(i.compress_type == zipfile.ZIP_STORED for i in archive.infolist())


def test_same_inputs_give_same_bytes_in_another_folder(path: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "elsewhere" / "other.plan").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", [*SECTIONS, "golden.json"])
def test_one_flipped_byte_names_the_section(path: Path, name: str) -> None:
    entry = Plan.open(path).entry(name)
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PlanError, match=name):
        Plan.open(path)


#: BLAKE3 of no bytes, from its published test vectors.
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_a_large_section_written_in_parts(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 7)  # more than one branch of the tree
    with PlanWriter(tmp_path / "engine.plan") as writer:
        with writer.section("weights") as sink:
            assert sink.digest() == EMPTY
            for start in range(0, len(data), 7777):
                sink.write(data[start : start + 7777])
        writer.seal(manifest())
        path = writer.publish()
    entry = Plan.open(path).entry("weights")
    assert entry.blake3 == blake3(data).hexdigest()
    whole = path.read_bytes()
    for at in (0, len(data) // 2, len(data) - 1):
        damaged = bytearray(whole)
        damaged[entry.offset + at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(PlanError, match="section weights does not match"):
            Plan.open(path)


def test_one_flipped_byte_in_the_manifest(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b'"x86-64-v3"') + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(PlanError, match="CRC"):
        Plan.open(path)


@pytest.mark.parametrize("keep", [0, 1, 100, PAGE, 3 * PAGE, -1, -30])
def test_truncation_at_any_place(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PlanError, match=r"truncated|empty"):
        Plan.open(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        Plan.open(tmp_path / "none.plan")
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(PlanError, match="not a complete plan"):
        Plan.open(other)


@pytest.mark.parametrize(("number", "remedy"), [(FORMAT_VERSION + 1, "update llmc"), (0, "rebuild")])
def test_another_format_is_refused_with_both_numbers(tmp_path: Path, number: int, remedy: str) -> None:
    path = write(tmp_path / "engine.plan", format=number)
    with pytest.raises(PlanError, match=f"format {number}.*format {FORMAT_VERSION}.*{remedy}"):
        Plan.open(path)


def test_a_machine_without_the_isa_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "engine.plan", target=Target("cpu", "x86-64-v9", ("avx9000",)))
    with pytest.raises(EnvironmentFault, match=r"x86-64-v9.*avx9000"):
        Plan.open(path).check_machine()


def test_an_unknown_section_is_named(path: Path) -> None:
    with pytest.raises(PlanError, match=r"code/rank7\.so"):
        Plan.open(path).section("code/rank7.so")


class _FullDisk(io.FileIO):
    """A file on a disk that is full after two pages."""

    def write(self, data: object) -> int:
        if self.tell() > 2 * PAGE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


def test_a_full_disk_leaves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = zipfile.ZipFile

    def on_full_disk(file: Path, *args: object) -> zipfile.ZipFile:
        return real(_FullDisk(file, "w+"), *args)  # type: ignore[call-overload]

    monkeypatch.setattr(plan_module.zipfile, "ZipFile", on_full_disk)
    with pytest.raises(EnvironmentFault, match="no space left"):
        write(tmp_path / "engine.plan")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_build_leaves_no_plan(tmp_path: Path) -> None:
    def build() -> None:
        with PlanWriter(tmp_path / "engine.plan") as writer, writer.section("a") as sink:
            sink.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()
    assert list(tmp_path.iterdir()) == []
