"""Building and calibrating take memory for a few tensors, not for the model: `make memory` in small.

A checkpoint of 0.3 GB breaks the bound if its weights are held once at float32; a larger one is held to the same.
"""

from pathlib import Path

import pytest

from tests.perf.memory import STEPS, Shape, measure
from tests.perf.synthetic import make_checkpoint

#: Of hidden size 1024 and 20 layers: 0.3 GB in bf16, 0.6 GB at float32.
SHAPE = Shape(0.3e9, hidden=1024, ffn=2048, vocab=4096, heads=8)
BOUND = 0.55e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_checkpoint(folder / "model", SHAPE.config())
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", STEPS)  # in this order: the last builds with the table of the one before
def test_a_step_stays_below_the_model_itself(folder: Path, step: str) -> None:
    found = measure(step, folder / "model", folder, resident=0, samples=1)
    assert found["peak"] - found["start"] < BOUND
