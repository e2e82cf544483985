"""One tiny checkpoint for the tests of this folder."""

from pathlib import Path

import pytest

from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from tests.models import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny Llama whose tokenizer puts BOS first; not to be changed."""
    path: Path = save_checkpoint(tmp_path_factory.mktemp("calibration") / "tiny", "llama")
    return open_checkpoint(path)
