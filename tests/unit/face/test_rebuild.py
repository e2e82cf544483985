"""The key of a build: what changes it, and what is never read for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.builder.file_hashes import FileHashes
from llmc.rebuild import Inputs, build_key

HASHES = FileHashes(None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def key(model: Path, settings: dict[str, object] | None = None, **files: Path) -> str | None:
    return build_key(Inputs(model, settings or {"tp": 1}, files), HASHES)


def test_files_options_and_named_files_change_it(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one")
    keys = [key(model), key(model, {"tp": 2}), key(model, eval=text)]
    text.write_text("two")
    keys.append(key(model, eval=text))
    (model / "model.safetensors").write_bytes(b"others!")
    keys.append(key(model))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_a_build_does_not_read_and_the_folders_name_do_not(model: Path) -> None:
    before = key(model)
    (model / "pytorch_model.bin").write_bytes(b"other weights")
    (model / "figures").mkdir()
    (model / "figures" / "x.json").write_text("{}")
    assert key(model) == before
    assert key(model.rename(model.parent / "renamed")) == before


def test_a_path_that_is_no_checkpoint_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.builder.file_hashes.sha256_file", lambda path: pytest.fail(f"{path} is read"))
    (tmp_path / "notes.txt").write_text("private")
    assert key(tmp_path) is None
    assert key(tmp_path / "nowhere") is None
    assert key(Path("/dev/zero")) is None
