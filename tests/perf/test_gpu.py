"""The GPU benchmark's arithmetic, with engines that take a known time; and that it says so where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.artifacts.errors import UsageError
from llmc.bench.work import Work, measure
from llmc.builder import pipeline
from llmc.builder.capacity.estimate import ModelFacts, Workload, decode_row, estimate, prefill_row
from llmc.builder.capacity.model import rank_facts
from llmc.builder.trace import trace_model
from llmc.profiles import load_gpu
from llmc.runtime.cuda.gpus import Gpu, Survey
from llmc.runtime.machine import has_gpu_driver
from tests.models import tiny_config
from tests.perf.gpu import Machine, machine, rows, shares, table
from tests.unit.cuda.recording import run as run_recorded


class FakeEngine:
    """Takes `factor` times a microsecond a token."""

    name, load = "fake", 0.0

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def run(self, work: Work, steps: int) -> float:
        return self.factor * work.tokens * 1e-6

    def memory(self) -> int:
        return 0


def test_rows_hold_timings_against_the_roofline() -> None:
    traced = trace_model(tiny_config("llama"))
    compiled = pipeline.run(traced.graph, pipeline.CompileOptions("fp8"))
    facts = ModelFacts("tiny", "fp8", "bf16", (rank_facts(compiled.graphs[0], "bf16", 64, 8),), 100, 64, 16)
    roofline = estimate(facts, load_gpu("h100-sxm"), Workload(64, 64))
    works = [Work("decode", 4, 32), Work("prefill", 1, 100)]
    graphs, plain = (measure([FakeEngine(factor)], works, 3, 2, lambda: None) for factor in (1.0, 1.5))
    decode, prefill = rows(graphs, plain, roofline)
    assert (decode.seconds, decode.launched_seconds) == pytest.approx((4e-6, 6e-6))
    assert decode.tokens_per_second == pytest.approx(1e6)
    assert decode.bound_seconds == decode_row(facts, roofline.gpu, 4, 33).seconds
    assert prefill.share == pytest.approx(prefill_row(facts, roofline.gpu, 100).seconds / 1e-4)
    here = Machine("NVIDIA H100 80GB HBM3", "13.0", "cuda:sm_90", "h100-sxm", "fp8")
    text = table(here, [decode, prefill], shares(["linear a", "rms_norm b", "linear c"], [3.0, 1.0, 4.0]))
    assert text.startswith(
        "NVIDIA H100 80GB HBM3 (cuda:sm_90, driver of CUDA 13.0), fp8; roofline of profiles/gpus/h100-sxm.yaml"
    )
    assert "kernels: linear 88%, rms_norm 12%" in text
    assert "| decode batch 4, context 32 | 0.00 ms | 0.01 ms |" in text


def test_shares_of_nothing() -> None:
    assert shares(["linear a"], [0.0]) == {}


@pytest.mark.parametrize(
    ("device", "sm", "described", "precision"),
    [("NVIDIA H200", 90, "h200-sxm", "fp8"), ("NVIDIA A100-SXM4-80GB", 80, "a100-sxm-80gb", "bf16")],
)
def test_the_roofline_is_the_devices_own(
    device: str, sm: int, described: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.perf.gpu.survey", lambda: Survey(13010, (Gpu(device, sm, 1, 1),)))
    assert machine(None) == Machine(device, "13.1", f"cuda:sm_{sm}", described, precision)


def test_a_device_that_is_not_described_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.perf.gpu.survey", lambda: Survey(13000, (Gpu("NVIDIA X", 90, 1, 1),)))
    with pytest.raises(UsageError, match=r"no description of 'NVIDIA X'.*--gpu: a100-sxm-80gb, .*"):
        machine(None)
    assert machine("h100-sxm").description == "h100-sxm"


#: The benchmark with layers and works so small that no GPU is needed to see that it is whole.
SMALL = """
import sys
from pathlib import Path
from llmc.bench.work import Work
from tests.perf.gpu import LLAMA_8B, machine, run, table

config = {**LLAMA_8B, "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 1024}
works = (Work("decode", 1, 300), Work("decode", 4, 300), Work("prefill", 1, 600))
here = machine(sys.argv[2])
print(table(here, *run(Path(sys.argv[1]), here, config, works, print)))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("sm", "gpu", "precision"), [("90", "h100-sxm", "fp8"), ("80", "a100-sxm-80gb", "bf16")])
def test_it_is_built_and_timed_on_a_driver_that_records(
    sm: str, gpu: str, precision: str, driver: Path, tmp_path: Path
) -> None:
    done = run_recorded(SMALL, [str(tmp_path), gpu], driver, FAKE_CUDA_SM=sm, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    head = f"Fake 0 (cuda:sm_{sm}, driver of CUDA 13.0), {precision}; roofline of profiles/gpus/{gpu}.yaml"
    assert lines.count(head) == 2
    (built,) = [line for line in lines if line.startswith("built in ")]
    assert "golden" not in built
    names = [line.split(" |")[0] for line in lines if line.startswith(("| decode", "| prefill"))]
    assert names == ["| decode batch 1, context 300", "| decode batch 4, context 300", "| prefill 600"]
    assert lines[-1].startswith("kernels: ")


#: Stands in for Python: it notes what it is asked for; tests end with 3, the benchmark as BENCHMARK says.
PYTHON = """#!/bin/bash
echo "$*" >> calls
case "$*" in *pytest\ -m*) exit 3;; *tests.perf.gpu*) echo table; exit $BENCHMARK;; *) exit $PRESENT;; esac
"""


@pytest.mark.parametrize(("present", "benchmark", "code", "calls"), [(0, 0, 3, 3), (0, 6, 3, 3), (1, 0, 1, 1)])
def test_the_benchmark_runs_whatever_tests_say_and_nothing_is_installed(
    present: int, benchmark: int, code: int, calls: int, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    makefile = Path(__file__).parents[2] / "Makefile"
    command = ["make", "-f", str(makefile), "gpu", f"BIN={tmp_path}"]
    environment = {**os.environ, "BENCHMARK": str(benchmark), "PRESENT": str(present)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2  # make's own
    assert f"Error {code}" in done.stderr
    asked = (tmp_path / "calls").read_text().splitlines()
    assert len(asked) == calls
    assert not any("pip" in line for line in asked)
    assert ("make gpu-install" in done.stderr) == (present != 0)
    if not present:
        assert (tmp_path / "build/gpu.md").read_text() == "table\n"


@pytest.mark.skipif(has_gpu_driver(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.perf.gpu", "--folder", str(tmp_path), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "no driver of an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
