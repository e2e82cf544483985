"""FP8 for GPUs that do not know it: refused before a checkpoint is read, with the option and what to choose instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.profiles import load_target
from llmc.rounding import RoundingOptions, usual_head
from llmc.tiny_model import tiny_model
from tests.models import save_checkpoint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "--fp8: cuda:sm_80 has no FP8; choose --dtype bf16, or a target from sm_89 on"),
        ({"precision": "bf16", "kv_dtype": "fp8"}, "--kv-cache-dtype fp8: cuda:sm_80 has no FP8"),
        ({"precision": "int8", "lm_head_dtype": "fp8"}, "--lm-head-dtype fp8: cuda:sm_80 has no FP8"),
    ],
)
def test_fp8_is_refused_before_anything_is_read(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        llmc.build("no such checkpoint", target="cuda:sm_80", **options)


def test_int8_experts_are_refused_before_minutes_of_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrated(*_: Any) -> None:
        raise AssertionError("calibration was asked for")

    monkeypatch.setattr(RoundingOptions, "table", calibrated)
    model = save_checkpoint(tmp_path / "model", "mixtral", model=tiny_model("mixtral"))
    words = r"experts.*: cuda:sm_90: INT8 weights of experts are for cpu targets alone; build with --fp8, --int4 or"
    with pytest.raises(UnsupportedError, match=words):
        llmc.build(model, tmp_path / "x.plan", precision="int8", target="cuda:sm_90", evaluate=False)


def test_the_output_head_is_fp8_only_where_there_is_fp8() -> None:
    heads = {name: usual_head(load_target(name)) for name in ("cpu", "cuda:sm_80", "cuda:sm_89")}
    assert heads == {"cpu": "fp8", "cuda:sm_80": "bf16", "cuda:sm_89": "fp8"}
