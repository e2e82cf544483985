"""The ranges that modelopt observes are the largest magnitudes that plain hooks see, for Linear and Conv1D alike."""

from pathlib import Path

import pytest
import torch

from llmc.artifacts.calibration import CalibrationTable
from llmc.artifacts.errors import UsageError
from llmc.builder.checkpoint import Checkpoint, open_checkpoint
from llmc.builder.reference import load_reference
from llmc.calibration import calibrate
from llmc.calibration.data import read_samples
from tests.models import save_checkpoint


@pytest.mark.parametrize(("family", "linears"), [("gpt2", 8), ("phi3", 8), ("llama", 14)])
def test_ranges(family: str, linears: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path / "model", family))
    (tmp_path / "a.jsonl").write_text(
        '{"text": "the quick brown fox"}\n{"text": "the lazy dog jumps"}\n{"text": "a"}\n'
    )
    table = calibrate(checkpoint, tmp_path / "a.jsonl", samples=8, tokens=64, seed=3)
    inputs, weights = hooked(checkpoint, read_samples(checkpoint, tmp_path / "a.jsonl", 8, 64, 3).ids)
    assert set(table.tensors) == set(inputs)
    assert len(inputs) == linears
    for path, ranges in table.tensors.items():
        assert ranges.input_amax == pytest.approx(inputs[path], rel=1e-5), path
        assert list(ranges.weight_amax) == weights[path], path
    assert table.data.samples == 3
    assert table.data.source == "text of a.jsonl"
    assert table.checkpoint == checkpoint.digest
    assert CalibrationTable.from_json(table.to_json()) == table


def hooked(
    checkpoint: Checkpoint, samples: tuple[tuple[int, ...], ...]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    from transformers.pytorch_utils import Conv1D

    model = load_reference(checkpoint)
    inputs: dict[str, float] = {}
    weights: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and name != "lm_head":
            by_channel = module.weight.T if isinstance(module, Conv1D) else module.weight
            weights[name] = by_channel.abs().amax(1).tolist()

            def note(_: object, args: tuple[torch.Tensor], name: str = name) -> None:
                inputs[name] = max(inputs.get(name, 0.0), float(args[0].abs().max()))

            module.register_forward_pre_hook(note)
    for sample in samples:
        model(torch.tensor([sample]))
    return inputs, weights


def test_without_data_the_model_writes_its_own(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    table = calibrate(checkpoint, samples=3, tokens=16, seed=5, progress=print)
    assert (table.data.samples, table.data.tokens, table.data.seed) == (3, 48, 5)
    assert table.data.source == "written by the model itself"
    lines = capsys.readouterr().out.splitlines()  # of the callback, and none of modelopt
    assert lines == [f"writing calibration text {n} 16" for n in range(2, 17)] + ["observing ranges 3 3"]
    assert calibrate(checkpoint, samples=3, tokens=16, seed=5).to_json() == table.to_json()


def test_sizes_that_cannot_be(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="not 0 of 16"):
        calibrate(checkpoint, samples=0, tokens=16)
    with pytest.raises(UsageError, match="257 tokens exceed the model's 256 positions"):
        calibrate(checkpoint, tokens=257)
