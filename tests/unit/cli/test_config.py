"""A file of build options: what it may hold, what wins over it, and how its mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmc.cli import main


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the build would have been asked to do."""
    from llmc.artifacts.errors import UsageError

    asked: dict[str, Any] = {}

    def build(model: Path, **options: Any) -> None:
        asked.update(options, model=model)
        raise UsageError("asked")

    monkeypatch.setattr("llmc.flow.build", build)
    return asked


def run(folder: Path, text: str, *arguments: object) -> Result:
    path = folder / "build.yaml"
    path.write_text(text)
    return CliRunner().invoke(main, ["build", "--config", str(path), *(str(a) for a in arguments)])


def test_every_option_by_its_name(built: dict[str, Any], tmp_path: Path) -> None:
    text = """
model: tiny
fp8: true
tp: 2
profile: shapes/short.yaml
target: cpu:x86-64-v4
kv-cache-dtype: bf16
fp8-activations: token
calib: table.json
tactics: fast.yaml
output: engine.plan
lock: llmc.lock
gate: off
eval: text.txt
eval-windows: 3
eval-length: 64
no-evaluate: false
verify-passes: true
no-cache: true
"""
    run(tmp_path, text)
    del built["progress"]
    assert built == {
        "model": tmp_path / "tiny", "precision": "fp8", "tp": 2, "profile": str(tmp_path / "shapes/short.yaml"),
        "target": "cpu:x86-64-v4", "kv_dtype": "bf16", "fp8_activations": "token", "fp8_budget": None,
        "lm_head_dtype": None,
        "calib": tmp_path / "table.json", "tactics": tmp_path / "fast.yaml",
            "output": tmp_path / "engine.plan", "lock": tmp_path / "llmc.lock",
        "gate": "off", "eval_text": tmp_path / "text.txt", "eval_windows": 3, "eval_length": 64, "evaluate": True,
        "verify_passes": True, "cache": False, "dump": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("tp: 2", ("--tp", 3), {"tp": 3}),
        ("fp8: true", ("--dtype", "fp32"), {"precision": "fp32"}),
        ("dtype: fp32", ("--fp8",), {"precision": "fp8"}),
        ("profile: batch", (), {"profile": "batch", "tp": 1}),
    ],
)
def test_the_command_line_wins(
    built: dict[str, Any], tmp_path: Path, text: str, arguments: tuple[object, ...], expected: dict[str, object]
) -> None:
    run(tmp_path, f"model: x\n{text}\n", *arguments)
    assert expected.items() <= built.items()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpp: 2", ("build.yaml", "unknown key 'tpp'", "did you mean 'tp'")),
        ("kv_cache_dtype: bf16", ("unknown key 'kv_cache_dtype'", "'kv-cache-dtype'")),
        ("tp: two", ("build.yaml", "tp is 'two'", "a whole number")),
        ("tp: true", ("tp is True", "a whole number")),
        ("tp: 0", ("tp is 0", "x>=1")),
        ("fp8: 'yes'", ("fp8 is 'yes'", "true or false")),
        ("dtype: fp16", ("dtype is 'fp16'", "fp32", "bf16")),
        ("target: 486", ("target is 486", "a text is needed")),
        ("- tp", ("build.yaml", "a mapping with the keys")),
        ("tp: [", ("build.yaml", "is not YAML")),
        ("fp8: true\ndtype: fp32", ("--fp8 and --dtype fp32 exclude",)),
    ],
)
def test_mistakes_are_named(built: dict[str, Any], tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    result = run(tmp_path, text, "--model", "x")
    assert (result.exit_code, built) == (2, {})
    line = next(line for line in result.output.splitlines() if line.startswith("error:"))
    for word in words:
        assert word in line, line


def test_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["build", "--config", str(tmp_path / "nowhere.yaml")])
    assert result.exit_code == 2
    assert "nowhere.yaml: cannot be read: No such file" in result.output
