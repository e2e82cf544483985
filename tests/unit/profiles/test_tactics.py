"""Tactics: read with errors that name the field, and told to the compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from llmc.artifacts.errors import UsageError
from llmc.plugins.cpu.call import PANEL
from llmc.plugins.linear.cpu import THREAD_FLOATS
from llmc.profiles import Tactics, load_cpu_target, target_names
from llmc.profiles.reading import Fields
from llmc.profiles.tactics import CHOICES
from llmc.profiles.targets import CudaTactics, read_cuda_tactics

GOOD = {"packed_rows": 4, "block": 128, "chunk_rows": 120, "prefetch_bytes": 512}


def test_a_file_reads_back_and_the_compiler_is_told(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(Tactics(**GOOD).to_yaml())
    tactics = Tactics.read(file)
    assert dataclasses.asdict(tactics) == GOOD
    flags = load_cpu_target("cpu", file).cxx_flags
    assert flags[1:] == (
        "-DLLMC_PACKED_ROWS=4",
        "-DLLMC_BLOCK=128",
        "-DLLMC_CHUNK_ROWS=120",
        "-DLLMC_PREFETCH_BYTES=512",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block": 100}, "block is 100; one of 64, 128, 256, 512"),
        ({"block": None}, "block is None; a whole number"),
        ({"packed_rows": "8"}, "packed_rows is '8'; a whole number"),
        ({"blocks": 128}, "unknown key 'blocks'; did you mean 'block'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(yaml.safe_dump(GOOD | change))
    with pytest.raises(UsageError, match=rf"t\.yaml: {words}"):
        Tactics.read(file)


@pytest.mark.parametrize("name", [name for name in target_names() if name.startswith("cpu:")])
def test_targets_have_tactics_that_kernels_have_scratch_for(name: str) -> None:
    tactics = dataclasses.asdict(load_cpu_target(name).tactics)
    assert all(tactics[key] in choices for key, choices in CHOICES.items())
    # Half a panel of a block, and the sums of a chunk.
    assert (max(CHOICES["block"]) // 2 + max(CHOICES["chunk_rows"])) * PANEL == THREAD_FLOATS


def test_a_file_of_a_cuda_target_changes_its_numbers_and_adds_none(tmp_path: Path) -> None:
    own = {"linear": {"wide": {"rows": 128, "cols": 64}, "thin": {"rows": 16}}}
    file = tmp_path / "t.yaml"

    def read(text: str) -> CudaTactics:
        file.write_text(text)
        return read_cuda_tactics(Fields.read(file, tuple(own)), own)

    assert read("{}") == own
    assert read("linear: {wide: {rows: 64}}") == {"linear": {"wide": {"rows": 64, "cols": 64}, "thin": {"rows": 16}}}
    for text, words in (
        ("attention: {}", "unknown key 'attention'"),
        ("linear: {skinny: {}}", "linear: unknown key 'skinny'"),
        ("linear: {wide: {depth: 64}}", "linear: wide: unknown key 'depth'"),
        ("linear: {wide: {rows: half}}", "linear: wide: rows is 'half'; a whole number"),
        ("linear: {wide: {rows: 96}}", "linear: wide: rows is 96; a power of two is needed"),
        ("linear: {wide: 64}", "linear: wide: is 64, a mapping with the keys rows, cols is needed"),
    ):
        with pytest.raises(UsageError, match=rf"t\.yaml: {words}"):
            read(text)
