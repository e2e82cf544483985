"""A plug-in is complete or absent: definition, reference, kernel and call; other folders are known to be none."""

import dataclasses
from pathlib import Path

import pytest

import llmc.plugins
from llmc.plugins import INCLUDE_ROOT, OPERATORS, cpu_launch, cuda_launch

FOLDER = Path(llmc.plugins.__file__).parent
#: Shared code of the targets, and what runs outside the graph.
NO_OPERATORS = {"cpu", "cuda", "sampler"}


def folders() -> set[str]:
    return {path.parent.name for path in FOLDER.glob("*/__init__.py")}


def test_every_folder_is_a_plugin() -> None:
    assert folders() - NO_OPERATORS == set(OPERATORS)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_a_plugin_is_complete(name: str) -> None:
    operator = OPERATORS[name]
    assert operator.name == name
    assert dataclasses.is_dataclass(operator.attrs)
    assert operator.attrs.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for part in (operator.attrs, operator.infer, operator.reference):
        assert part.__doc__, f"{part} of {name} says nothing of itself"
    assert "cpu" in operator.targets or cuda_launch(name) is not None, f"{name} has kernels for no target"
    if "cpu" in operator.targets:
        assert callable(cpu_launch(name))
        assert (INCLUDE_ROOT / "plugins" / name / "cpu.h").exists(), f"{name} has no kernel"
