"""`llmc build --int4` from end to end: ranks, the gate, tables, and options that mean nothing to it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import llmc
from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan
from llmc.builder.checkpoint import open_checkpoint
from llmc.calibration import CalibrationOptions, calibrate
from llmc.cli import main
from llmc.runtime.selftest import Probe
from tests.builds import SMALL, use_own_cache
from tests.models import save_checkpoint
from tests.quantized import save_packed

MODULE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 9 heads of 32 columns rank 1 of 2 has a group that it shares with rank 0."""
    folder = tmp_path_factory.mktemp("int4") / "tiny"
    return save_checkpoint(folder, "llama", hidden_size=288, intermediate_size=300)


@pytest.fixture(scope="module")
def table(model: Path) -> Path:
    path = model.parent / "t.json"
    calibrate(open_checkpoint(model), CalibrationOptions.of("int4"), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of other builds is used."""
    use_own_cache(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_is_near_its_checkpoint_on_any_ranks(model: Path, table: Path, tmp_path: Path, tp: int) -> None:
    loose = "ppl=20%,kl=0.2,top1=0.2,cosine=0.8,greedy=0.1"  # of random weights, whose best token changes easily
    report = llmc.build(
        model,
        tmp_path / "x.plan",
        precision="int4",
        calib=table,
        tp=tp,
        gate=loose,
        eval_windows=2,
        eval_length=64,
        profile=SMALL,
    )
    assert report.published
    assert report.quality["kl"] > 1e-5
    plan = Plan.open(tmp_path / "x.plan")
    assert plan.manifest.build.precision == "int4"
    notes = next(p.notes for p in plan.manifest.build.passes if p.name == "quantize")
    assert sum("% of the loss of pure INT4, " in note for note in notes) == 15
    assert sum("of pure INT4, INT4" in note for note in notes) >= 12
    again = CliRunner().invoke(main, ["inspect", "--command", str(tmp_path / "x.plan")])
    assert " --int4 " in again.output


def test_a_checkpoint_that_int4_does_not_fit_is_refused_by_the_gate(model: Path, table: Path, tmp_path: Path) -> None:
    arguments = [
        "build",
        "--model",
        str(model),
        "--int4",
        "--calib",
        str(table),
        "--gate",
        "kl=0",
        "--eval-windows",
        "1",
        "--eval-length",
        "32",
        "--profile",
        SMALL,
    ]
    refused = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "x.plan")])
    assert refused.exit_code == 5, refused.output
    assert not (tmp_path / "x.plan").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, r"t\.json: its weights were rounded to int4, and this build is fp8; build with --int4"),
        ({"fp8_budget": 1.3}, r"--fp8-budget 1\.3: is for FP8, and this build is INT4"),
        ({"precision": "bf16"}, "only an FP8, INT8 or INT4 build is calibrated"),
    ],
)
def test_options_that_contradict_the_table(
    model: Path, table: Path, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    asked: dict[str, object] = {"precision": "int4", "evaluate": False, **options}
    with pytest.raises(UsageError, match=words):
        llmc.build(model, tmp_path / "x.plan", calib=table, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--int4", "--fp8"], "--fp8 and --int4 exclude one another"),
        (["build", "--int4", "--dtype", "bf16"], "--int4 and --dtype bf16 exclude one another"),
        (["calibrate", "--int4", "--fp8-budget", "1.2"], "--fp8-budget is for FP8"),
    ],
)
def test_options_that_exclude_one_another(arguments: list[str], words: str) -> None:
    refused = CliRunner().invoke(main, [*arguments, "--model", "nowhere"])
    assert words in refused.output
    assert refused.exit_code == 2


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_ready_checkpoint_keeps_its_numbers(tmp_path: Path, method: str) -> None:
    """The engine answers as Hugging Face does with the weights that the numbers stand for, but for a bf16 head."""
    folder = save_packed(tmp_path, method)
    report = llmc.build(folder, tmp_path / "x.plan", tp=2, evaluate=False, kv_dtype="f32", profile=SMALL)
    plan = Plan.open(tmp_path / "x.plan")
    graph = bytes(plan.section("graph/rank1.ir")).decode()
    assert f"stored('{MODULE}.weight', 'u4')" in graph
    assert "int4(" not in graph
    assert any(f"INT4 scales are the checkpoint's ({method.upper()})" in note for note in report.notes)
    assert plan.manifest.build.precision == "int4"
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "plain", dtype=torch.float32)
    ids = [5, 17, 101, 33, 250, 8, 64, 299, 12, 40]
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    with Probe(plan) as probe:
        got = probe.logits(ids)
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()
    with pytest.raises(UsageError, match="this checkpoint is INT4 already"):
        llmc.build(folder, tmp_path / "y.plan", precision="int4", calib=tmp_path / "t.json")
