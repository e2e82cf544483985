"""Tests that run on NVIDIA GPUs: skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.profiles import target_names
from llmc.runtime.cuda.gpus import Survey, survey


@pytest.fixture(scope="session")
def machine() -> Survey:
    """The GPUs of this machine."""
    try:
        found = survey()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))
    if not found.gpus:
        pytest.skip("the driver shows no GPU")
    if (name := f"cuda:sm_{found.gpus[0].sm}") not in target_names():
        pytest.skip(f"there is no target {name}")
    return found
