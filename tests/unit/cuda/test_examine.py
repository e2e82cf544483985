"""A build on a machine with a GPU: the engine is asked only where the GPU is of the plan's kind and has room for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmc import examine as module
from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.plan import machine_features
from llmc.artifacts.schema import Manifest, RankProgram, ShapeProfile, Target, TokenRange
from llmc.examine import cannot_run, require_judge
from llmc.gate import make_exam
from llmc.runtime.cuda.gpus import Gpu, Survey

GIB = 1 << 30
TARGET = Target("cuda", "sm_90", (), 13000)
PROFILE = ShapeProfile("p", (TokenRange(1, 1, 64),), 8, 256, 16)


def manifest(weights: int) -> Manifest:
    rank = RankProgram(0, "code", "weights", "graph", weights, GIB, 1000, (), 0, 8, 1, 1.0, state_slot_bytes=0)
    fields: dict[str, Any] = {f.name: None for f in dataclasses.fields(Manifest)}
    return Manifest(**{**fields, "target": TARGET, "profile": PROFILE, "ranks": (rank,), "shared_bytes": 0})


def machine_with(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, driver: int = 13000) -> None:
    monkeypatch.setattr(module, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(module, "survey", lambda: Survey(driver, gpus))


def test_a_gpu_of_the_plans_kind_with_room_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, Gpu("H100", 90, 80 * GIB, 70 * GIB))
    assert cannot_run(TARGET, 1) is None
    assert cannot_run(TARGET, 1, manifest(10 * GIB)) is None


@pytest.mark.parametrize(
    ("gpu", "driver", "tp", "words"),
    [
        (Gpu("L4", 89, 24 * GIB, 23 * GIB), 13000, 1, "GPU 0 (L4) is of sm_89"),
        (Gpu("H100", 90, 80 * GIB, 70 * GIB), 13000, 2, "the plan has 2 ranks"),
        (Gpu("H100", 90, 80 * GIB, 70 * GIB), 12080, 1, "driver is of CUDA 12.8"),
        (Gpu("H100", 90, 80 * GIB, 8 * GIB), 13000, 1, "too little free memory on this machine's GPU"),
    ],
)
def test_any_other_gpu_is_a_reason(gpu: Gpu, driver: int, tp: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, gpu, driver=driver)
    reason = cannot_run(TARGET, tp, manifest(10 * GIB))
    assert reason is not None
    assert words in reason


def test_a_driver_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey() -> Survey:
        raise EnvironmentFault("the GPU's driver cannot be used: cuInit")

    monkeypatch.setattr(module, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(module, "survey", survey)
    assert cannot_run(TARGET, 1) == "the GPU's driver cannot be used: cuInit"
    monkeypatch.setattr(module, "has_gpu_driver", lambda: False)
    assert cannot_run(TARGET, 1) == "no GPU"
    assert cannot_run(Target("cpu", "x86-64-v3", tuple(machine_features())), 1) is None


def test_a_gate_that_cannot_judge_publishes_nothing() -> None:
    exam = make_exam("bf16", "kl=1", True, None, 1, 16)
    with pytest.raises(EnvironmentFault, match=r"does not fit: so an engine for cuda:sm_90 .* --gate off"):
        require_judge(exam, TARGET, "does not fit")
    require_judge(exam, TARGET, None)
    require_judge(dataclasses.replace(exam, gate=None), TARGET, "does not fit")
