"""`llmc build --fp8` from end to end: a table and its weights give one plan wherever they stand, and no others do."""

import json
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc import flow
from llmc.artifacts.calibration import read_table
from llmc.artifacts.errors import CheckpointError, UsageError
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.weights.placement import ALIGN
from llmc.calibration import CalibrationOptions, calibrate
from llmc.runtime.selftest import Probe
from tests.builds import SMALL, use_own_cache
from tests.models import save_checkpoint

OPTIONS = {"precision": "fp8", "tp": 2, "evaluate": False, "profile": SMALL}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("fp8") / "tiny", "llama")


@pytest.fixture(scope="module")
def table(model: Path) -> Path:
    path = model.parent / "t.json"
    calibrate(open_checkpoint(model), CalibrationOptions(samples=4, tokens=64, budget=1.15), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of other builds is used but objects."""
    use_own_cache(tmp_path / "cache", monkeypatch)


def copied(table: Path, folder: Path) -> Path:
    for file in (table, table.with_suffix(".safetensors")):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / table.name


def test_a_table_gives_the_same_plan_wherever_it_stands(model: Path, table: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name, calib in (("a", table), ("b", copied(table, tmp_path / "elsewhere"))):
        llmc.build(model, tmp_path / f"{name}.plan", calib=calib, **OPTIONS)
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()
    build = Plan.open(tmp_path / "a.plan").manifest.build
    notes = next(p.notes for p in build.passes if p.name == "quantize")
    shares = [float(note.split()[1]) for note in notes if "of the loss of pure FP8" in note]
    assert len(shares) == 15
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert any("kept in bf16" in note for note in notes)
    assert build.config["fp8_activations"] == "token"
    errors = json.loads(bytes(Plan.open(tmp_path / "a.plan").section("report.json")))["weight_errors"]
    rounded = {path for path, entry in read_table(table).tensors.items() if entry.choice and not entry.choice.kept}
    assert all(0.01 < errors[f"{path}.weight"] < 0.05 for path in rounded)  # E4M3 has four significant bits


def test_an_output_head_answers_alike_on_any_ranks(model: Path, tmp_path: Path) -> None:
    """Its 300 rows are 5 panels, of which the third rank has the last, in part. The embedding that it is tied to stays
    bf16. Inputs are not rounded: sums in another order would be rounded otherwise.
    """
    table, options = tmp_path / "t.json", CalibrationOptions(samples=4, tokens=64, activations="none")
    calibrate(open_checkpoint(model), options, table)
    logits, rows = {}, {1: 300, 3: 44}
    for tp in (1, 3):
        report = llmc.build(model, tmp_path / f"{tp}.plan", calib=table, **OPTIONS | {"tp": tp, "kv_dtype": "f32"})
        plan = Plan.open(tmp_path / f"{tp}.plan")
        graph = bytes(plan.section(f"graph/rank{tp - 1}.ir")).decode()
        assert f"f8e4m3[{rows[tp]},72] = param()" in graph
        assert "bf16[300,72] = param() {recipe=\"cast(load('model.embed_tokens.weight'), 'bf16')\"}" in graph
        assert plan.manifest.build.config["lm_head_dtype"] == "fp8"
        stored = [section.size for section in plan.manifest.sections if section.name.startswith("weights/")]
        assert report.memory.weights_bytes == sum(stored)
        with Probe(plan) as probe:
            logits[tp] = probe.logits([5, 17, 101, 33, 250, 8, 64, 299, 12, 40])
    np.testing.assert_allclose(logits[3], logits[1], rtol=1e-3, atol=1e-3 * np.abs(logits[1]).max())


def test_the_arithmetic_knows_the_output_head(model: Path) -> None:
    """Five panels of 64 rows and 72 columns: a byte a number less, and a scale a row more."""
    shape = {"tp": 1, "profile": "chat", "target": "cpu"}
    size = {
        head: flow.plan_memory(model, precision="fp8", lm_head_dtype=head, **shape).weights_bytes
        for head in ("bf16", "fp8", None)
    }
    assert size[None] == size["fp8"]
    assert size["bf16"] - size["fp8"] == 5 * 64 * 72 - -(-300 * 4 // ALIGN) * ALIGN
    with pytest.raises(UsageError, match="--lm-head-dtype fp8: only an FP8, INT8 or INT4 build is calibrated"):
        flow.plan_memory(model, precision="bf16", lm_head_dtype="fp8", **shape)


def test_activations_may_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    """What FP8 weights alone cost is a part of what they cost with FP8 activations."""
    quality = {}
    for activations in ("none", "token"):
        table = tmp_path / f"{activations}.json"
        calibrate(
            open_checkpoint(model), CalibrationOptions(samples=4, tokens=64, activations=activations, budget=1.0), table
        )
        options = OPTIONS | {"evaluate": True, "gate": "off", "eval_windows": 2, "eval_length": 64}
        report = llmc.build(model, tmp_path / f"{activations}.plan", calib=table, **options)
        quality[activations] = report.quality["kl"]
        assert Plan.open(report.plan).manifest.build.config["fp8_activations"] == activations
    graph = bytes(Plan.open(tmp_path / "none.plan").section("graph/rank0.ir")).decode()
    assert "x_per_token=true" not in graph.lower()
    assert quality["none"] < quality["token"]


def test_weights_that_are_not_the_tables_are_refused(model: Path, table: Path, tmp_path: Path) -> None:
    calib = copied(table, tmp_path)
    weights = calib.with_suffix(".safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match=r"t\.safetensors: has SHA-256"):
        llmc.build(model, tmp_path / "x.plan", calib=calib, **OPTIONS)
    weights.unlink()
    with pytest.raises(UsageError, match=r"t\.safetensors: no such file"):
        llmc.build(model, tmp_path / "x.plan", calib=calib, **OPTIONS)
    assert not (tmp_path / "x.plan").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp8_budget": 1.3}, r"--fp8-budget 1\.3: .* was made with 1\.15"),
        ({"fp8_activations": "static"}, "--fp8-activations static: .* was made with token"),
        ({"lm_head_dtype": "bf16"}, "--lm-head-dtype bf16: .* was made with fp8"),
        ({"precision": "bf16"}, "only an FP8, INT8 or INT4 build is calibrated"),
    ],
)
def test_options_that_contradict_the_table(
    model: Path, table: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        llmc.build(model, tmp_path / "x.plan", calib=table, **{**OPTIONS, **options})
