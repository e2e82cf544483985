"""The shape of the project: fixed top level, one name per module, small files, wheel equal to the tree."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from llmc.artifacts import VERSION

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("artifacts", "plugins", "profiles", "builder", "calibration", "runtime", "cli")
TOP = {
    *ROOMS,
    "llmc",
    "tests",
    "pyproject.toml",
    "setup.py",
    "Makefile",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
}
MAX_LINES = 400
PACKAGED = {".py", ".h", ".cpp", ".yaml", ".json", ".css", ".jinja"}


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).exists()]


def sources(*suffixes: str) -> list[Path]:
    return [path for path in tracked() if path.suffix in suffixes]


def test_the_top_level_is_fixed() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {n for n in names if not n.startswith(".")} == TOP | {"LICENSE"}


def test_rooms_are_imported_by_their_full_name() -> None:
    # From the root of the tree a bare `import builder` works too, and is a second module with its own classes.
    bad = []
    for path in sources(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = ["."] if node.level else [node.module or ""]
            bad += [f"{path.relative_to(ROOT)}:{node.lineno}" for n in names if n.split(".")[0] in {*ROOMS, ""}]
    assert bad == []


def test_files_stay_small() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources(".py", ".h", ".cpp")
        if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_no_folder_shadows_a_library() -> None:
    assert not {p.name for p in tracked()} & {"triton", "onnx", "tensorrt", "utils.py"}


@pytest.mark.timeout(300)
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, as setuptools would pack what an earlier build has left
    for path in tracked():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("llmc/")}
    wanted = {
        str(path.relative_to(ROOT)) if path.is_relative_to(ROOT / "llmc") else f"llmc/{path.relative_to(ROOT)}"
        for path in tracked()
        if path.suffix in PACKAGED and path.relative_to(ROOT).parts[0] in {*ROOMS, "llmc"}
    }
    assert packed == wanted


def test_one_version() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["project"]["version"] == VERSION
