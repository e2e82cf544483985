"""What tests/gpu asks of a GPU, "run" on the driver that only records: every launch is legal, decodes of three
sequences are padded to four, parts of contexts are joined, tokens are chosen, blocks and states move. Nothing is
computed, but what kernel tests ask for: that is interpreted as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.cases import CASES, LONG, built
from tests.unit.cuda.recording import lines_of, run

#: What a decode launches that no other kind of step does.
DECODE = {"long contexts": {"decode", "combine"}, "fp8 cache": {"decode", "combine"}, "experts": {"route", "experts"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_legal(name: str, folder: Path, driver: Path, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / f"{name.replace(' ', '-')}.plan"
    path.symlink_to(built(folder, case, "cuda:sm_90"))
    log = tmp_path / "log"
    done = run("from tests.gpu.cases import main; main()", [str(path)], driver, FAKE_CUDA_LOG=str(log))
    assert done.returncode == 0, done.stderr
    lines = lines_of(log)
    captured = [line for line in lines if line[:2] == ["captured", "launch"]]
    assert {line[3] for line in captured} >= DECODE.get(name, set())
    if case.steps is LONG:  # three sequences, and an empty one
        assert {line[4].split(",")[0] for line in captured if line[3] == "decode"} >= {"4"}
    assert any(line[0] == "replay" for line in lines)


@pytest.mark.timeout(900)
def test_kernel_tests_are_legal(driver: Path) -> None:
    """Some of each way to launch: the driver records, and the interpreter computes what the tests expect."""
    chosen = (
        "attention_decode or grouped_linear_many or latent_cache or linear_groups or norms_rounded or "
        "recurrent_matches or rows_copy or sampler_a_vocabulary or whole_program_a_token"
    )
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py", "-k", chosen]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "CI": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
