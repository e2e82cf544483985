"""The measured loss of a module is what rounding it alone does to the model's divergence."""

import pytest
import torch

from llmc.builder.checkpoint import Checkpoint
from llmc.builder.reference import load_reference
from llmc.calibration.data import documentation
from llmc.calibration.formats import FORMATS
from llmc.calibration.modules import by_outputs, linear_modules
from llmc.calibration.sensitivity import Sensitivity, measure, quantizer


@pytest.mark.parametrize("activations", ["token", "static"])
def test_the_loss_of_a_module_is_the_divergence_that_its_inputs_rounding_causes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    monkeypatch.setattr("llmc.calibration.sensitivity.COMPENSATED", 0.0)  # inputs alone, which are easy to do for real
    samples = documentation(checkpoint, 8, 64, 0).ids
    model = load_reference(checkpoint)
    exact = model(torch.tensor(samples)).logits.log_softmax(-1)
    as_read = quantizer(activations, FORMATS["fp8"])
    forms = dict.fromkeys(linear_modules(model), FORMATS["fp8"])
    loss = measure(model, samples, forms, as_read, 0, lambda done, total: None).loss
    for path, module in linear_modules(model).items():
        hook = module.register_forward_pre_hook(
            lambda m, args: (as_read(args[0].flatten(0, -2), by_outputs(m)).view_as(args[0]),)
        )
        changed = model(torch.tensor(samples)).logits.log_softmax(-1)
        hook.remove()
        divergence = float((exact.exp() * (exact - changed)).sum(-1).mean())
        assert 0.5 * divergence < loss[path] < 2 * divergence, path


def test_what_costs_most_for_its_bytes_is_kept() -> None:
    shapes = {"a": (100, 100), "b": (100, 100), "c": (10, 100), "d": (100, 100)}
    loss = {"a": 0.1, "b": 0.9, "c": 0.2, "d": 0.3}
    sensitivity = Sensitivity(loss, [("a", "b"), ("c",), ("d",)], shapes, dict.fromkeys(shapes, FORMATS["fp8"]))
    total, one = 310 * 104, 100 * 96
    assert sensitivity.kept(1.0) == frozenset()
    assert sensitivity.kept(1 + 10 * 96 / total) == {"c"}
    assert sensitivity.kept(1 + (one + 10 * 96) / total) == {"c", "d"}  # the pair is dearer, but does not fit
    assert sensitivity.kept(1 + (2 * one + 10 * 96) / total) == {"c", "a", "b"}
    assert sensitivity.kept(2.0) == {"a", "b", "c", "d"}


def test_inputs_that_cost_most_for_their_multiplications_stay() -> None:
    """All readers of an input or none; a module that is bf16 has nothing to keep."""
    shapes = {"q": (60, 100), "k": (40, 100), "up": (300, 100), "down": (100, 300), "o": (100, 100)}
    readers = {"q": ("q", "k"), "k": ("q", "k"), "up": ("up",), "down": ("down",), "o": ("o",)}
    losses = {"q": 0.5, "k": 0.3, "up": 0.9, "down": 0.3, "o": 0.7}
    sensitivity = Sensitivity(
        losses, [(path,) for path in shapes], shapes, dict.fromkeys(shapes, FORMATS["fp8"]), readers, losses
    )
    assert sensitivity.kept_inputs(frozenset(), 0.0) == frozenset()
    assert sensitivity.kept_inputs(frozenset(), 0.125) == {"q", "k"}
    assert sensitivity.kept_inputs(frozenset(), 0.3) == {"q", "k", "o"}  # up would not fit
    assert sensitivity.kept_inputs(frozenset(), 0.625) == {"q", "k", "o", "up"}
    assert sensitivity.kept_inputs(frozenset({"q"}), 0.1) == {"k"}
