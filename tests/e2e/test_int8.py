"""`llmc build --int8` from end to end: ranks, the gate, tables, and options that mean nothing to it."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import llmc
from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.calibration import CalibrationOptions, calibrate
from llmc.cli import main
from llmc.runtime.selftest import Probe
from tests.builds import SMALL, use_own_cache
from tests.models import save_checkpoint

IDS = [5, 17, 101, 33, 250, 8, 64, 299, 12, 40]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 3 KV heads rank 0 of 2 has two."""
    folder = tmp_path_factory.mktemp("int8") / "tiny"
    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 150}
    return save_checkpoint(folder, "llama", **shape)


@pytest.fixture(scope="module")
def table(model: Path) -> Path:
    path = model.parent / "t.json"
    calibrate(open_checkpoint(model), CalibrationOptions.of("int8"), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of other builds is used."""
    use_own_cache(tmp_path / "cache", monkeypatch)


def test_an_engine_is_near_its_checkpoint_on_any_ranks(model: Path, table: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"profile": SMALL, "eval_windows": 2, "eval_length": 48}
    options["gate"] = "top1=0.5,greedy=0.5"  # of random weights, whose best token changes easily
    logits = []
    for tp in (1, 2):
        report = llmc.build(model, tmp_path / "x.plan", precision="int8", calib=table, tp=tp, **options)  # type: ignore[arg-type]
        assert report.published
        assert 1e-7 < report.quality["kl"] < 0.01
        with Probe(Plan.open(tmp_path / "x.plan")) as probe:
            logits.append(probe.logits(IDS))
    assert not np.array_equal(*logits), "each rank rounds its own columns"
    assert np.abs(logits[0] - logits[1]).max() < 0.1 * np.abs(logits[0]).max()
    plan = Plan.open(tmp_path / "x.plan")
    assert plan.manifest.build.precision == "int8"
    passes = {p.name: p for p in plan.manifest.build.passes}
    assert sum("% of the loss of pure INT8, INT8" in note for note in passes["quantize"].notes) >= 7
    assert passes["fold_factors"].matched > 0
    again = CliRunner().invoke(main, ["inspect", "--command", str(tmp_path / "x.plan")])
    assert " --int8 " in again.output


def test_a_checkpoint_that_int8_does_not_fit_is_refused_by_the_gate(model: Path, table: Path, tmp_path: Path) -> None:
    arguments = ["build", "--model", str(model), "--int8", "--calib", str(table), "--gate", "kl=0"]
    arguments += ["--eval-windows", "1", "--eval-length", "32", "--profile", SMALL, "-o", str(tmp_path / "x.plan")]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 5, refused.output
    assert not (tmp_path / "x.plan").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, r"t\.json: its weights were rounded to int8, and this build is fp8; build with --int8"),
        ({"fp8_budget": 1.3}, r"--fp8-budget 1\.3: is for FP8, and this build is INT8"),
        ({"fp8_activations": "static"}, r"--fp8-activations static: is for FP8, and this build is INT8"),
    ],
)
def test_options_that_contradict_the_table(
    model: Path, table: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    asked: dict[str, object] = {"precision": "int8", "evaluate": False, **options}
    with pytest.raises(UsageError, match=words):
        llmc.build(model, tmp_path / "x.plan", calib=table, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--int8", "--int4"], "--int8 and --int4 exclude one another"),
        (["calibrate", "--int8", "--int4"], "--int8 and --int4 exclude one another"),
        (["calibrate", "--int8", "--fp8-budget", "1.2"], "--fp8-budget is for FP8; drop it, or --int8"),
        (["tune", "--int8", "--fp8"], "fp8 and int8 exclude one another"),
    ],
)
def test_options_that_exclude_one_another(arguments: list[str], words: str) -> None:
    refused = CliRunner().invoke(main, [*arguments, "--model", "nowhere"])
    assert words in refused.output
    assert refused.exit_code == 2
