"""The GPU benchmark's arithmetic, with engines that take a known time; and that it says so where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmc.bench.work import Work, measure
from llmc.builder import pipeline
from llmc.builder.capacity.estimate import ModelFacts, Workload, decode_row, estimate, prefill_row
from llmc.builder.capacity.model import rank_facts
from llmc.builder.trace import trace_model
from llmc.profiles import load_gpu
from llmc.runtime.machine import has_gpu_driver
from tests.models import tiny_config
from tests.perf.gpu import rows, shares, table


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
    text = table([decode, prefill], shares(["linear a", "rms_norm b", "linear c"], [3.0, 1.0, 4.0]))
    assert "kernels: linear 88%, rms_norm 12%" in text
    assert "| decode batch 4, context 32 | 0.00 ms | 0.01 ms |" in text


def test_shares_of_nothing() -> None:
    assert shares(["linear a"], [0.0]) == {}


@pytest.mark.skipif(has_gpu_driver(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.perf.gpu", "--folder", str(tmp_path), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "no driver of an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
