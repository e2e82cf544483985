"""Tiny models' plans on the GPU, end to end: beside the CPU engine, graphs beside plain launches, tokens that the GPU
chooses beside the host's, blocks and states that were copied out and in, two ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.runtime.cuda.gpus import Survey
from tests.gpu.cases import CASES, Case, built, chosen, logits
from tests.unit.cuda.whole_program import BOUNDS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, machine: Survey) -> Case:
    found = CASES[request.param]
    if found.fp8 and machine.gpus[0].sm < 89:
        pytest.skip(f"sm_{machine.gpus[0].sm} has no FP8")
    return found


@pytest.fixture
def plan(machine: Survey, folder: Path, case: Case) -> Path:
    return built(folder, case, f"cuda:sm_{machine.gpus[0].sm}")


def near(have: list[np.ndarray], want: list[np.ndarray], bound: float) -> None:
    for step, (h, w) in enumerate(zip(have, want, strict=True)):
        assert np.sqrt(np.mean((h - w) ** 2)) <= bound * np.sqrt(np.mean(w**2)), f"step {step}"


def test_logits_are_the_cpu_engines(plan: Path, folder: Path, case: Case) -> None:
    bound = BOUNDS["fp8" if case.fp8 else case.precision]
    near(logits(plan, case.steps), logits(built(folder, case, "cpu"), case.steps), bound)


def test_replayed_graphs_compute_what_launches_compute(plan: Path, case: Case) -> None:
    first, replayed, launched = (logits(plan, case.steps, timed=timed) for timed in (False, False, True))
    assert all(map(np.array_equal, first, replayed))
    assert all(map(np.array_equal, first, launched))


def test_what_was_copied_out_and_in_counts_as_before(plan: Path, case: Case) -> None:
    stayed, moved = (logits(plan, case.steps, moved=moved) for moved in (False, True))
    assert all(map(np.array_equal, stayed, moved))


def test_the_gpu_chooses_the_hosts_tokens(plan: Path) -> None:
    have, want, row, same_row = chosen(plan)
    assert have == want
    np.testing.assert_array_equal(row, same_row)


def test_two_ranks_compute_what_one_computes(machine: Survey, folder: Path, case: Case, plan: Path) -> None:
    if len(machine.gpus) < 2:
        pytest.skip("needs two GPUs")
    two = built(folder, case, f"cuda:sm_{machine.gpus[0].sm}", tp=2)
    near(logits(two, case.steps), logits(plan, case.steps), BOUNDS["fp8" if case.fp8 else case.precision])
