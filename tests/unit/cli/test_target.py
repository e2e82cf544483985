"""The option --target of the commands that compile."""

from __future__ import annotations

import pytest

from llmc.artifacts.errors import UsageError
from llmc.cli.target import TargetName
from llmc.profiles import load_cpu_target


def test_native_is_the_fastest_level_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    level = load_cpu_target("cpu:x86-64-v4-vnni")
    monkeypatch.setattr("llmc.artifacts.plan.machine_features", lambda: frozenset(level.features))
    assert TargetName().convert("cpu:native", None, None) == "cpu:x86-64-v4-vnni"
    assert TargetName().convert("cpu", None, None) == "cpu"
    monkeypatch.setattr("llmc.artifacts.plan.machine_features", frozenset)
    with pytest.raises(UsageError, match="not all of x86-64-v3"):
        TargetName().convert("cpu:native", None, None)
