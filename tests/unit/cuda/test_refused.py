"""FP8 for GPUs that do not know it: refused before a checkpoint is read, with the option and what to choose instead."""

from __future__ import annotations

from typing import Any

import pytest

import llmc
from llmc.artifacts.errors import UsageError
from llmc.profiles import load_target
from llmc.rounding import usual_head


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


def test_the_output_head_is_fp8_only_where_there_is_fp8() -> None:
    heads = {name: usual_head(load_target(name)) for name in ("cpu", "cuda:sm_80", "cuda:sm_89")}
    assert heads == {"cpu": "fp8", "cuda:sm_80": "bf16", "cuda:sm_89": "fp8"}
