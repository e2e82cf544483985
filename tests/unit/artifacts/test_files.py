"""Files that are written whole: what was there stays when a write fails, and the error names the option."""

import errno
from pathlib import Path

import pytest

from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.artifacts.files import require_writable, write_file
from llmc.artifacts.lock import require_lockable


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in (b"one", b"two"):
        write_file(path, data)
        assert path.read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot write"), (errno.EFBIG, "cannot write")],
)
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail(file: Path, data: bytes) -> int:
        file.touch()
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(EnvironmentFault, match=f"{words}.*--report"):
        write_file(path, b"new", "--report")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_asking_beforehand_writes_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "a.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot write .*file.*--lock"):
        require_writable(tmp_path / "file" / "a.lock", "--lock")
    with pytest.raises(EnvironmentFault, match="is a folder; name a file with --output"):
        require_writable(tmp_path / "new")


def test_a_lock_file_is_read_before_a_build_relies_on_it(tmp_path: Path) -> None:
    require_lockable(tmp_path / "llmc.lock")
    (tmp_path / "llmc.lock").write_text("{}")
    with pytest.raises(PlanError, match="is not a lock file"):
        require_lockable(tmp_path / "llmc.lock")
