"""What counts as a linear module."""

from llmc.calibration.modules import linear_modules
from llmc.tiny_model import tiny_model


def test_a_router_that_is_a_linear_and_chooses_as_well_is_no_linear_module() -> None:
    paths = linear_modules(tiny_model("llama4_text")).keys()
    assert "model.layers.0.feed_forward.shared_expert.up_proj" in paths
    assert not [path for path in paths if path.endswith("router") or path == "lm_head"]
