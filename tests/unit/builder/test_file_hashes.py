"""Digests of files: remembered as long as nothing about the file changed."""

import os
from pathlib import Path

import pytest

from llmc.artifacts.hashing import sha256_file
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.file_hashes import FileHashes


@pytest.fixture
def hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileHashes:
    """As if every file had stood for a while."""
    monkeypatch.setattr("llmc.builder.file_hashes._SETTLED_NS", -1)
    return FileHashes(ObjectCache(tmp_path / "cache", suffix=".json"))


def unread(path: Path) -> str:
    raise AssertionError(f"{path} is read")


def test_an_unchanged_file_is_read_once(hashes: FileHashes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    digest = hashes.sha256(path)
    assert digest == sha256_file(path)
    monkeypatch.setattr("llmc.builder.file_hashes.sha256_file", unread)
    assert hashes.sha256(path) == digest
    with pytest.raises(AssertionError, match="is read"):
        FileHashes(None).sha256(path)


def test_other_bytes_of_the_same_size_and_time_are_seen(hashes: FileHashes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    first, status = hashes.sha256(path), path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashes.sha256(path) == sha256_file(path) != first


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = FileHashes(ObjectCache(tmp_path / "cache", suffix=".json"))
    path = tmp_path / "x"
    path.write_bytes(b"one")
    now = path.stat().st_ctime_ns + 1_900_000_000
    monkeypatch.setattr("llmc.builder.file_hashes.time.time_ns", lambda: now)
    hashes.sha256(path)
    monkeypatch.setattr("llmc.builder.file_hashes.sha256_file", unread)
    with pytest.raises(AssertionError, match="is read"):
        hashes.sha256(path)
