"""What counts as a linear module."""

from pathlib import Path

import pytest

from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.reference import load_reference
from llmc.calibration.modules import linear_modules
from llmc.tiny_model import tiny_model
from tests.models import save_checkpoint


def test_a_router_that_is_a_linear_and_chooses_as_well_is_no_linear_module() -> None:
    paths = linear_modules(tiny_model("llama4_text")).keys()
    assert "model.layers.0.feed_forward.shared_expert.up_proj" in paths
    assert not [path for path in paths if path.endswith("router") or path == "lm_head"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_streamed_model_has_the_linear_modules_of_one_in_memory(tmp_path: Path, family: str) -> None:
    held = tiny_model(family)
    save_checkpoint(tmp_path, family)
    found = linear_modules(load_reference(open_checkpoint(tmp_path))).keys()
    assert found == linear_modules(held).keys()
    assert len(found) > 4
