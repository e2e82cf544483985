"""The gate through the whole build: sound engines of each precision pass, a broken one is published nowhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmc
from llmc import examine
from llmc.artifacts.calibration import CalibrationTable, Ranges
from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.calibration import CalibrationOptions, calibrate
from llmc.cli import main
from llmc.gate import DEFAULTS
from tests.builds import SMALL
from tests.models import save_checkpoint
from tests.unit.calibration.tables import ranges_alone

GATE = 5
FIGURES = ("perplexity_change", "kl", "top1", "cosine_p5", "greedy")
#: Enough for a verdict on a tiny model, in a second.
QUICK: dict[str, Any] = {"eval_windows": 3, "eval_length": 128, "profile": SMALL}
#: The logits of a random model are flat: FP8 changes its best token where it would not change a trained model's.
FLAT = "top1=0.7,greedy=0.6"
QUICK_OPTIONS = ("--eval-windows", "3", "--eval-length", "128", "--profile", SMALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def table(model: Path) -> CalibrationTable:
    options = CalibrationOptions(samples=4, tokens=64)
    return ranges_alone(calibrate(open_checkpoint(model), options, model.parent / "made.json"))


def quality_of(plan: Path) -> dict[str, Any]:
    return json.loads(bytes(Plan.open(plan).section("quality.json")))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sound_engine_passes_its_precisions_gate(model: Path, tmp_path: Path, precision: str) -> None:
    report = llmc.build(model, tmp_path / "x.plan", precision=precision, **QUICK)
    quality = quality_of(tmp_path / "x.plan")
    assert report.published
    assert report.quality == quality
    assert (quality["run"], quality["verdict"], quality["gate"]) == ("done", "passed", str(DEFAULTS[precision]))
    assert (quality["windows"], quality["window"], quality["tokens"]) == (3, 128, 3 * 127)
    assert quality["greedy_tokens"] == 4 * 12 + 3 * 16
    assert all(isinstance(quality[name], float) for name in FIGURES)


def test_a_broken_quantization_is_caught_and_published_nowhere(
    model: Path, table: CalibrationTable, tmp_path: Path
) -> None:
    path, plan, report = tmp_path / "table.json", tmp_path / "x.plan", tmp_path / "report.json"
    options = ("build", "--model", model, "--fp8", "--fp8-activations", "static", "--calib", path, "-o", plan,
               "--report", report, *QUICK_OPTIONS, "--gate", FLAT)  # fmt: skip
    path.write_bytes(table.to_json())
    sound = run(*options)
    assert sound.exit_code == 0, sound.output
    good = plan.read_bytes()
    # Activations of a fiftieth of their true range are cut off nearly everywhere.
    ranges = {name: Ranges(r.input_amax / 50, r.weight_amax) for name, r in table.tensors.items()}
    path.write_bytes(dataclasses.replace(table, tensors=ranges).to_json())
    result = run(*options)
    assert result.exit_code == GATE, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("error:"))
    for word in ("gate failed", "kl: at most", "--gate"):
        assert word in line
    assert plan.read_bytes() == good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "table.json", "x.plan"]
    written = json.loads(report.read_text())
    assert written["published"] is False
    assert "kl: at most" in written["quality"]["verdict"]
    assert written["quality"]["kl"] > DEFAULTS["fp8"].kl


def test_bounds_of_the_users_own_and_none(model: Path, tmp_path: Path) -> None:
    plan = tmp_path / "x.plan"
    options = ("build", "--model", model, "-o", plan, *QUICK_OPTIONS)
    strict = run(*options, "--gate", "kl=0,cosine=1")
    assert strict.exit_code == GATE, strict.output
    assert not plan.exists()
    assert run(*options, "--gate", "off").exit_code == 0
    quality = quality_of(plan)
    assert (quality["run"], quality["gate"], quality["verdict"]) == ("done", "off", "not judged")
    assert quality["kl"] >= 0


def test_the_gate_judges_what_was_measured_not_what_is_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(examine._DIGITS, "kl", lambda kl: 0.0)
    report = tmp_path / "report.json"
    result = run(
        "build", "--model", model, "-o", tmp_path / "x.plan", *QUICK_OPTIONS, "--gate", "kl=0", "--report", report
    )
    assert result.exit_code == GATE, result.output
    assert json.loads(report.read_text())["quality"]["kl"] == 0


def test_a_text_of_ones_own(model: Path, tmp_path: Path) -> None:
    text, plan = tmp_path / "mine.txt", tmp_path / "x.plan"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    llmc.build(model, plan, eval_text=text, **QUICK)
    assert quality_of(plan)["text"].startswith("text of mine.txt, sha256 ")


def test_a_text_that_cannot_be_used_is_refused_before_the_build(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    for options in (("--eval", tmp_path / "mine.txt"), ("--eval-windows", 10_000)):
        refused = run("build", "--model", model, "-o", tmp_path / "x.plan", *options)
        assert refused.exit_code == 2
        assert f"{options[0]} {options[1]}" in refused.output or "mine.txt: holds no text" in refused.output
        assert not {"trace", "compile", "weights"} & {line.split(" ")[0] for line in refused.output.splitlines()}


def test_no_comparison_says_so(model: Path, tmp_path: Path) -> None:
    llmc.build(model, tmp_path / "x.plan", evaluate=False, profile=SMALL)
    assert quality_of(tmp_path / "x.plan") == {"run": "not asked for", "gate": "off", "verdict": "not judged"}


def test_an_engine_that_cannot_run_here_is_published_only_unjudged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.examine.machine_features", frozenset)
    with pytest.raises(EnvironmentFault, match=r"lacks .*avx2.* cannot be compared .* --gate off"):
        llmc.build(model, tmp_path / "x.plan", profile=SMALL)
    assert list(tmp_path.iterdir()) == []
    report = llmc.build(model, tmp_path / "x.plan", gate="off", profile=SMALL)
    assert report.quality["run"].startswith("not run: this machine lacks")
    assert report.quality["verdict"] == "not judged"


@pytest.mark.parametrize("option", [("--gate", "kl=1"), ("--eval", "x.txt")])
def test_what_the_skipped_comparison_would_need_is_refused(model: Path, option: tuple[str, str]) -> None:
    result = run("build", "--model", model, "--no-evaluate", *option)
    assert result.exit_code == 2
    assert option[0] in result.output
