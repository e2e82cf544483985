"""`--tactics` and `llmc tune`: other code, the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import llmc
from llmc.artifacts.plan import Plan
from llmc.cli import main
from llmc.profiles import Tactics, load_target
from llmc.runtime.selftest import Probe
from tests.builds import SMALL
from tests.models import save_checkpoint

IDS = [5, 17, 101, 33, 250, 8, 64, 299, 12, 40, 7, 9, 77, 13, 200, 31, 55]
OPTIONS = {"precision": "fp8", "tp": 2, "evaluate": False, "profile": SMALL}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tactics") / "tiny", "llama")


def test_other_tactics_are_other_code_and_the_same_numbers(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(Tactics(packed_rows=4, block=64, chunk_rows=60, prefetch_bytes=512).to_yaml())
    logits, code = [], []
    for name, tactics in (("own", None), ("mine", file)):
        path = tmp_path / f"{name}.plan"
        llmc.build(model, path, tactics=tactics, **OPTIONS)
        plan = Plan.open(path)
        code.append(bytes(plan.section("code/rank0.so")))
        with Probe(plan) as probe:
            logits.append(probe.logits(IDS))
    assert code[0] != code[1]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert "tactics" not in Plan.open(tmp_path / "own.plan").manifest.build.config
    build = Plan.open(tmp_path / "mine.plan").manifest.build
    assert build.config["tactics"] == "mine.yaml"
    assert "-DLLMC_BLOCK=64" in build.flags
    assert llmc.build(model, tmp_path / "mine.plan", tactics=file, **OPTIONS).unchanged
    printed = CliRunner().invoke(main, ["inspect", str(tmp_path / "mine.plan"), "--command"]).output
    assert "# mine.yaml: {packed_rows: 4, block: 64, chunk_rows: 60, prefetch_bytes: 512}" in printed
    assert "--tactics mine.yaml" in printed
    for name, used in (("own", load_target("cpu").tactics), ("mine", Tactics.read(file))):
        numbers = ", ".join(f"{key}: {value}" for key, value in vars(used).items())
        shown = CliRunner().invoke(main, ["inspect", str(tmp_path / f"{name}.plan")], env={"COLUMNS": "200"}).output
        label = "default" if name == "own" else "mine.yaml"
        assert re.search(rf"^ *tactics +{re.escape(f'{label}: {{{numbers}}}')} *$", shown, re.MULTILINE)


def test_tune_writes_what_build_takes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.tune.CHOICES", {"block": (128, 256)})
    file = tmp_path / "tuned.yaml"
    done = CliRunner().invoke(
        main, ["tune", "--model", str(model), "--dtype", "bf16", "--profile", SMALL, "--repeats", "1", "-o", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "block 128: " in done.output
    own = load_target("cpu").tactics
    assert Tactics.read(file) in (own, Tactics(**{**vars(own), "block": 128}))


def test_tune_takes_what_a_plan_says(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "own.plan"
    llmc.build(model, plan, **OPTIONS)
    heard: list[tuple[Path, str, dict[str, object]]] = []

    def tune(model: Path, target: str, shape: dict[str, object], *rest: object) -> str:
        heard.append((model, target, shape))
        return "block: 256\n"

    monkeypatch.setattr("llmc.tune.tune", tune)
    words = ["tune", str(plan), "--model", str(model), "-o", str(tmp_path / "t.yaml")]
    done = CliRunner().invoke(main, [*words, "--profile", SMALL])
    assert done.exit_code == 0, done.output
    build = Plan.open(plan).manifest.build
    ((_, target, shape),) = heard
    assert (target, shape["precision"], shape["tp"]) == (build.config["target"], build.precision, build.tp)
    assert shape["profile"] == SMALL
    for name in ("kv_dtype", "lm_head_dtype", "fp8_activations", "fp8_budget"):
        assert shape[name] == build.config[name]
    refused = CliRunner().invoke(main, [*words, "--fp8"])
    assert refused.exit_code == 2
    assert "--fp8 and PLAN exclude one another" in refused.output
    other = CliRunner().invoke(main, ["tune", str(plan), "--model", str(tmp_path)])
    assert other.exit_code == 3
    assert "is missing" in other.output
    assert len(heard) == 1
