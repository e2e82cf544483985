"""A tiny model's plan on the GPU, end to end: beside the CPU engine, graphs beside plain launches, two ranks."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.artifacts.plan import Plan
from llmc.runtime.cuda.gpus import Survey
from llmc.runtime.executor import Executor
from llmc.runtime.step import Chunk, StepBatch
from tests.models import save_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
BLOCKS = 16
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
#: Tokens of two sequences in each step: a prefill and a chunk beside it, decodes, a decode alone.
STEPS = (([5, 6, 7, 8, 9], [11, 12]), ([13], [14]), ([15], [16]), ([17], []))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("gpu") / "model", "llama", **SIZES)


def built(checkpoint: Path, target: str, tp: int = 1, precision: str = "bf16") -> Path:
    plan = checkpoint.parent / f"{target.replace(':', '-')}-{tp}-{precision}.plan"
    if not plan.exists():
        options = {"fp8_activations": "token"} if precision == "fp8" else {}
        llmc.build(checkpoint, plan, target=target, tp=tp, precision=precision, evaluate=False, **options)
    return plan


def logits(path: Path, *, timed: bool = False) -> list[np.ndarray]:
    """Of the last token of each sequence, by step. A timed executor launches one by one, any other replays decodes."""
    executor = Executor(Plan.open(path), num_blocks=BLOCKS, timed=timed)
    tables = [array("i", range(0, 4)), array("i", range(4, 8))]
    lengths, made = [0, 0], []
    try:
        for tokens in STEPS:
            chunks = [Chunk(array("i", own), lengths[n], tables[n], 1, n) for n, own in enumerate(tokens) if len(own)]
            lengths = [length + len(own) for length, own in zip(lengths, tokens, strict=True)]
            made.append(np.array(executor.run(StepBatch(chunks))))
    finally:
        executor.close()
    return made


def near(have: list[np.ndarray], want: list[np.ndarray], bound: float) -> None:
    for h, w in zip(have, want, strict=True):
        assert np.sqrt(np.mean((h - w) ** 2)) <= bound * np.sqrt(np.mean(w**2))


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("fp8", 0.04)])
def test_logits_are_the_cpu_engines(machine: Survey, checkpoint: Path, precision: str, bound: float) -> None:
    sm = machine.gpus[0].sm
    if precision == "fp8" and sm < 89:
        pytest.skip(f"sm_{sm} has no FP8")
    have = logits(built(checkpoint, f"cuda:sm_{sm}", precision=precision))
    near(have, logits(built(checkpoint, "cpu", precision=precision)), bound)


def test_replayed_graphs_compute_what_launches_compute(machine: Survey, checkpoint: Path) -> None:
    plan = built(checkpoint, f"cuda:sm_{machine.gpus[0].sm}")
    first, replayed, launched = logits(plan), logits(plan), logits(plan, timed=True)
    assert all(map(np.array_equal, first, replayed))
    assert all(map(np.array_equal, first, launched))


def test_two_ranks_compute_what_one_computes(machine: Survey, checkpoint: Path) -> None:
    if len(machine.gpus) < 2:
        pytest.skip("needs two GPUs")
    target = f"cuda:sm_{machine.gpus[0].sm}"
    near(logits(built(checkpoint, target, tp=2)), logits(built(checkpoint, target)), 0.02)
