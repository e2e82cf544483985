"""Tests that run on NVIDIA GPUs: skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from llmc.artifacts.errors import EnvironmentFault
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
    return found
