"""Builds as CI runs them: from a config, unchanged ones recognised, stages re-used, the same bytes anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

import llmc
from llmc.artifacts import errors
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.calibration import CalibrationOptions, calibrate
from llmc.cli import main
from llmc.gate import parse_gate
from tests.builds import SMALL, use_own_cache
from tests.models import save_checkpoint

pytestmark = pytest.mark.timeout(900)
#: A random model's flat logits: FP8 changes its best token where it would not change a trained model's.
FLAT = "kl=0.1,top1=0.6,greedy=0.5"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    use_own_cache(tmp_path_factory.mktemp("cache") / "own", patch)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a build.yaml beside it, and the plan that was built from both."""
    folder = tmp_path_factory.mktemp("ci")
    model = save_checkpoint(folder / "tiny", "llama")
    calibrate(open_checkpoint(model), CalibrationOptions(samples=4, tokens=64), folder / "table.json")
    options = {
        "model": "tiny", "fp8": True, "tp": 2, "calib": "table.json", "gate": FLAT, "eval-windows": 2,
        "eval-length": 64, "output": "out/engine.plan", "report": "report.json",
    }  # fmt: skip
    (folder / "build.yaml").write_text(yaml.safe_dump(options))
    result = run("build", "--config", folder / "build.yaml")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def plan(folder: Path) -> Path:
    return folder / "out" / "engine.plan"


def test_the_resolved_config_is_in_the_plan(plan: Path) -> None:
    config = Plan.open(plan).manifest.build.config
    assert config["precision"] == "fp8"
    assert config["kv_dtype"] == "bf16"
    assert (config["tp"], config["profile"], config["target"]) == (2, "chat", "cpu:x86-64-v3")
    assert config["gate"] == str(parse_gate(FLAT, "fp8"))
    assert (config["eval_windows"], config["eval_length"]) == (2, 64)
    assert str(plan.parent.parent) not in json.dumps(config)


def test_an_unchanged_build_is_recognised_without_the_compilers_libraries(folder: Path, plan: Path) -> None:
    before = plan.stat()
    code = (
        "import sys, json; from click.testing import CliRunner; from llmc.cli import main; "
        "result = CliRunner().invoke(main, ['build', '--config', sys.argv[1], '--json']); "
        "assert result.exit_code == 0, result.output; "
        "heavy = {'torch', 'transformers', 'modelopt'} & set(sys.modules); "
        "print(json.dumps([json.loads(result.stdout), sorted(heavy)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder / "build.yaml"], capture_output=True, text=True, check=True
    )
    report, heavy = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert (report["unchanged"], list(report["seconds"])) == (True, ["hash"])
    assert report["digest"] == Plan.open(plan).digest
    assert (plan.stat().st_mtime_ns, plan.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert json.loads((folder / "report.json").read_text())["unchanged"] is True


def test_a_changed_profile_reuses_trace_and_calibration(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("build", "--model", folder / "tiny", "--fp8", "--no-evaluate", "-o", tmp_path / "x.plan")
    assert run(*options).exit_code == 0
    result = run(*options, "--profile", "long-context", "--report", report)
    assert result.exit_code == 0, result.output
    assert json.loads(report.read_text())["reused"] == ["calibrate", "trace"]
    assert re.search(r"trace +[\d.]+ s, reused", result.output)


def test_what_inspect_prints_builds_the_same_bytes_on_another_machine(plan: Path, tmp_path: Path) -> None:
    """Another folder, name of the checkpoint, number of threads, hash seed, locale and vector width; nothing cached."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    printed = run("inspect", plan, "--config")
    assert printed.exit_code == 0
    config = yaml.safe_load(printed.stdout)
    shutil.copytree(plan.parent.parent / "tiny", other / config["model"])
    for file in plan.parent.parent.glob("table.*"):  # the table, and the weights that were rounded with it
        shutil.copy(file, other / file.name)
    shutil.copy(other / "table.json", other / config["calib"])
    (other / "build.yaml").write_text(printed.stdout)
    env = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7", "ATEN_CPU_CAPABILITY": "default", "LC_ALL": "C", "TZ": "Asia/Tokyo",
    }  # fmt: skip
    command = [
        sys.executable,
        "-c",
        "from llmc.cli import main; main()",
        "build",
        "--config",
        other / "build.yaml",
        "--no-cache",
    ]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (other / "engine.plan").read_bytes() == plan.read_bytes()


def test_the_command_line_that_inspect_prints(plan: Path) -> None:
    result = run("inspect", plan, "--command")
    comments, (line,) = (
        [x for x in result.stdout.splitlines() if x[0] == "#"],
        [x for x in result.stdout.splitlines() if x[0] != "#"],
    )
    assert line.startswith("llmc build --model llama-0.1M --fp8 --profile chat")
    words = ("--tp 2", "--kv-cache-dtype bf16", "--calib calibration.json", "--eval-windows 2", "--output engine.plan")
    assert all(word in line for word in words), line
    assert Plan.open(plan).manifest.checkpoint.digest in comments[0]
    assert any(comment.startswith("# calibration.json: the table of this build") for comment in comments)


def test_another_file_at_the_output_or_in_the_checkpoint_is_built_anew(tmp_path: Path) -> None:
    model, out = save_checkpoint(tmp_path / "model", "llama"), tmp_path / "x.plan"
    options = {"precision": "fp32", "evaluate": False, "profile": SMALL}
    first = llmc.build(model, out, **options)
    good = out.read_bytes()
    assert llmc.build(model, out, **options).unchanged
    with pytest.raises(
        errors.UsageError, match="--fp8-activations none: only an FP8, INT8 or INT4 build"
    ):  # the default, but asked
        llmc.build(model, out, **options, fp8_activations="none")
    damaged = bytearray(good)
    damaged[len(good) // 2] ^= 1
    out.write_bytes(damaged)
    again = llmc.build(model, out, **options)
    assert (again.unchanged, again.reused, again.digest, out.read_bytes() == good) == (
        False, ("trace",), first.digest, True,
    )  # fmt: skip
    config = model / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "temperature": 0.5}))
    assert llmc.build(model, out, **options).digest != first.digest
    assert not llmc.build(model, out, **options, cache=False).unchanged


def test_a_dry_run_reads_no_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "fromfile", lambda *_, **__: pytest.fail("a dry run reads no weights"))
    result = run("build", "--config", folder / "build.yaml", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tp"] == 2


def test_the_help_names_every_exit_code() -> None:
    text = " ".join(run("build", "--help").output.split())
    for kind, words in {
        errors.UsageError: "usage", errors.CheckpointError: "checkpoint refused", errors.GateError: "gate failed",
        errors.UnsupportedError: "model unsupported", errors.EnvironmentFault: "environment",
    }.items():  # fmt: skip
        assert f"{kind.exit_code} {words}" in text
