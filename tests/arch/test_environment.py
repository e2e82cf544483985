"""Serving needs neither compiler nor PyTorch: an environment with the base requirements only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "serve-venv"
BUILD_ONLY = ("torch", "transformers", "modelopt", "safetensors", "gguf")


@pytest.fixture(scope="module")
def serve_python() -> Path:
    """The interpreter of a virtual environment made by `pip install llmc`, without extras."""
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / ".installed"
    pyproject = ROOT / "pyproject.toml"
    if not stamp.exists() or stamp.stat().st_mtime < pyproject.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-e", str(ROOT)], check=True, capture_output=True)
        stamp.touch()
    return python


def run(python: Path, code: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd="/", env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_has_no_build_library(serve_python: Path) -> None:
    code = f"import importlib.util, json; print(json.dumps([n for n in {BUILD_ONLY!r} if importlib.util.find_spec(n)]))"
    assert json.loads(run(serve_python, code)) == []


@pytest.mark.parametrize(
    "module", ["llmc.runtime.engine", "llmc.runtime.server.app", "llmc.runtime.core_main", "llmc.cli.serve"]
)
def test_the_runtime_imports_there(serve_python: Path, module: str) -> None:
    run(serve_python, f"import {module}")


def test_help_is_instant(serve_python: Path) -> None:
    # Counted in modules, not in seconds: whatever is heavy is imported inside the command that needs it.
    code = (
        "import sys; from click.testing import CliRunner; from llmc.cli import main; "
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0; "
        "print(*[m for m in ('numpy', 'fastapi', 'uvicorn', 'tokenizers', 'rich') if m in sys.modules])"
    )
    assert run(serve_python, code).split() == []


def test_building_there_says_what_to_install(serve_python: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [str(serve_python), "-m", "llmc", "build", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert "llmc[build]" in done.stderr
    assert "Traceback" not in done.stderr


def test_serving_a_plan_there(serve_python: Path, smollm2_plan: Path) -> None:
    command = [
        str(serve_python),
        "-m",
        "llmc",
        "run",
        str(smollm2_plan),
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "4",
    ]
    done = subprocess.run([*command, "--temperature", "0"], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
