"""The stages of a build on a tiny checkpoint: what the plan holds, what is reported, what a failure leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Ranges
from llmc.artifacts.errors import CheckpointError, EnvironmentFault, GateError, LlmcError, UsageError
from llmc.artifacts.plan import Plan
from llmc.builder.build import BuildOptions, BuildReport, Progress, compile_plan, dry_run
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.verdict import Verdict
from tests.builds import SMALL
from tests.models import save_checkpoint

torch.set_num_threads(1)
OPTIONS = BuildOptions(precision="fp32", tp=2, profile=SMALL)
LINEARS = (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


class Stages(Progress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, list[tuple[int, int | None]]] = {}

    def advanced(self, name: str, done: int, total: int | None) -> None:
        self.counts.setdefault(name, []).append((done, total))


@pytest.fixture(scope="module")
def built(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildReport, Plan, Stages]:
    out, stages = tmp_path_factory.mktemp("out") / "tiny.plan", Stages()

    def self_test(path: Path) -> Verdict:
        assert not out.exists()
        assert Plan.open(path).manifest.build.tp == 2
        figures = {"perplexity": 11.0, "reference_perplexity": 10.0, "perplexity_change": 0.1}
        return Verdict({"quality.json": json.dumps(figures).encode()}, figures)

    report = compile_plan(checkpoint, OPTIONS, None, out, stages, self_test)
    return report, Plan.open(out), stages


def test_the_plan_holds_every_section(built: tuple[BuildReport, Plan, Stages]) -> None:
    names = {section.name for section in built[1].manifest.sections}
    ranks = {
        f"{kind}/rank{r}.{end}" for r in (0, 1) for kind, end in (("graph", "ir"), ("code", "so"), ("weights", "bin"))
    }
    texts = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    rest = {"weights/shared.bin", "config.json", "report.json", "quality.json"}
    assert names == ranks | {f"tokenizer/{t}" for t in texts} | rest


def test_the_manifest_says_what_the_sections_are(built: tuple[BuildReport, Plan, Stages]) -> None:
    report, plan, _ = built
    manifest = plan.manifest
    assert plan.digest == report.digest
    for rank in manifest.ranks:
        assert plan.entry(rank.weights).size == rank.weights_bytes
    assert plan.entry(manifest.shared_weights).size == manifest.shared_bytes > 0
    assert sum(rank.vocab_size for rank in manifest.ranks) == manifest.model.vocab_size
    assert [rank.vocab_start for rank in manifest.ranks] == [0, manifest.ranks[0].vocab_size]
    assert manifest.build.config == {
        "precision": "fp32", "kv_dtype": "f32", "tp": 2, "profile": "small", "target": "cpu:x86-64-v3",
    }  # fmt: skip
    assert all(rank.launches_per_layer <= 8 for rank in manifest.ranks)
    assert manifest.build.launches_eager_per_layer > 8
    assert json.loads(bytes(plan.section("report.json")))["launches"]["paged_attention"] == 2


def test_a_dry_run_says_beforehand_what_the_build_takes(
    checkpoint: Checkpoint, built: tuple[BuildReport, Plan, Stages], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a dry run reads no weights"))
    monkeypatch.setattr("llmc.builder.cpu.compile.Compiler._run", lambda *_: pytest.fail("a dry run compiles nothing"))
    assert dry_run(checkpoint, OPTIONS) == built[0].memory


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_a_dry_run_needs_no_calibration(checkpoint: Checkpoint, precision: str) -> None:
    memory = dry_run(checkpoint, BuildOptions(precision=precision, tp=1))
    assert memory.precision == precision
    assert memory.comm_bytes == memory.shared_bytes == 0
    assert memory.weights_bytes < dry_run(checkpoint, BuildOptions(precision="fp32", tp=1)).weights_bytes


def test_the_report_has_every_stage_and_the_peak(built: tuple[BuildReport, Plan, Stages]) -> None:
    report, _, stages = built
    assert list(report.seconds) == ["trace", "passes", "lower", "compile", "weights", "seal"]
    for name in ("compile", "weights"):
        done, total = stages.counts[name][-1]
        assert done <= total  # type: ignore[operator]
    assert stages.counts["compile"][-1] == (8, 8)
    assert report.peak_memory_bytes > 50_000_000
    rows = dict(report.rows())
    assert rows["peak memory"].endswith(" MB, without g++")
    assert rows["perplexity"] == "11.0, Hugging Face at fp32 10.0 (+10.00%)"
    assert "8.0 compiled" in rows["launches a layer"]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        (BuildOptions(cxx="no-such-compiler"), EnvironmentFault, "'no-such-compiler' is not there"),
        (BuildOptions(target="cpu:486"), UsageError, "'cpu:486' is not one of"),
        (BuildOptions(profile="nightly"), UsageError, "'nightly' is neither"),
        (BuildOptions(precision="fp8", fp8_activations="static"), UsageError, "calibration table"),
        (BuildOptions(precision="fp16"), UsageError, "'fp16' is not one of"),
    ],
)
def test_a_failed_build_leaves_nothing(
    options: BuildOptions, error: type[LlmcError], reason: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        compile_plan(checkpoint, options, None, tmp_path / "x.plan", Progress())
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_is_not_of_the_weights_is_refused_before_anything_is_compiled(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.builder.cpu.compile.Compiler._run", lambda *_: pytest.fail("compiled"))
    paths = (f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS)
    data = CalibrationData("none", "0" * 64, 0, 0, 0)
    table = CalibrationTable(checkpoint.digest, "none", "max", data, {path: Ranges(1.0, (1.0,)) for path in paths})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.\S+: the calibration table has 1 weight ranges"):
        compile_plan(checkpoint, BuildOptions(precision="fp8"), table, tmp_path / "x.plan", Progress())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_self_test_leaves_the_old_plan(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.plan"
    out.write_bytes(b"old")

    def self_test(path: Path) -> Verdict:
        return Verdict({"quality.json": b"{}"}, {"kl": 9.0}, ("KL divergence is 9 (kl: at most 0.02)",))

    with pytest.raises(GateError, match=r"gate failed: KL divergence is 9 .* Nothing was published") as failure:
        compile_plan(checkpoint, OPTIONS, None, out, Progress(), self_test)
    report = failure.value.report
    assert isinstance(report, BuildReport)
    assert (report.published, report.quality) == (False, {"kl": 9.0})
    assert dict(report.rows())["plan"].endswith("not published")
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.plan"]


def test_a_peak_is_of_the_process_itself_not_of_the_one_that_started_it() -> None:
    held = np.ones(1_500_000_000, np.uint8)  # getrusage of a child would count these
    words = [sys.executable, "-c", "from llmc.builder.build import peak_memory; print(peak_memory())"]
    peak = int(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert 10_000_000 < peak < held.nbytes
