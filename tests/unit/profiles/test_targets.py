"""Targets: plain cpu is one fixed ISA level, and the files say what kernels and compiler know."""

from __future__ import annotations

import pytest

from llmc.artifacts.errors import UsageError
from llmc.plugins.cpu.blocks import BLOCK_SIZES
from llmc.profiles import load_target, target_names


def test_plain_cpu_does_not_depend_on_the_machine() -> None:
    assert load_target("cpu") == load_target("cpu:x86-64-v3")


@pytest.mark.parametrize("name", target_names())
def test_files_agree_with_their_names_and_with_the_kernels(name: str) -> None:
    target = load_target(name)
    assert str(target) == name
    assert f"-march={target.isa.removesuffix('-vnni')}" in target.cxx_flags
    assert target.block_sizes == BLOCK_SIZES
    assert target.fingerprint.features == tuple(sorted(set(target.features)))


def test_a_higher_level_needs_all_of_the_lower() -> None:
    v3, v4, vnni = (set(load_target(f"cpu:x86-64-{level}").features) for level in ("v3", "v4", "v4-vnni"))
    assert v3 < v4 < vnni


@pytest.mark.parametrize("name", ["gpu", "cpu:x86-64-v9", "cpu:native", "", "cuda:sm_90"])
def test_unknown_targets_are_refused_with_the_names(name: str) -> None:
    with pytest.raises(UsageError, match="is not one of cpu, cpu:x86-64-v3, cpu:x86-64-v4"):
        load_target(name)
