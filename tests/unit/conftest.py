"""Fixtures of more than one folder of unit tests."""

from pathlib import Path

import pytest

from tests.unit.cuda.recording import compile_driver


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a libcuda.so.1 that only records."""
    return compile_driver(tmp_path_factory.mktemp("driver"))
