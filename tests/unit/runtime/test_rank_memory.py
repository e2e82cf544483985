"""How a rank comes by its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.runtime.rank_main import _map_file, _read_file


def test_weights_are_the_same_mapped_and_read(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 5, np.uint8)
    path = tmp_path / "plan"
    path.write_bytes(content.tobytes())
    with path.open("rb") as file:
        for span in ((4096, 8192), (0, len(content)), (8192, 0)):
            mapped, read = _map_file(file.fileno(), span), _read_file(file.fileno(), span)
            np.testing.assert_array_equal(mapped, content[span[0] : sum(span)])
            np.testing.assert_array_equal(read, mapped)


def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    path.write_bytes(bytes(5000))
    with path.open("rb") as file, pytest.raises(EnvironmentFault, match="ends 3192 bytes too early"):
        _read_file(file.fileno(), (4096, 4096))
