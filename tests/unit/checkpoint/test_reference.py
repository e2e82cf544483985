"""The reference is the model that `from_pretrained` loads, for every family, at float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.reference import build_model, greedy, load_reference, logits
from tests.models import FAMILIES, save_checkpoint, tiny_model

IDS = [0, 17, 200, 41, 6, 299, 13, 77, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_checkpoint(tmp_path, family)
    model = load_reference(open_checkpoint(path))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        want = theirs(torch.tensor([IDS])).logits[0].numpy()
    assert np.array_equal(logits(model, IDS), want)
    ends = {"eos_token_id": None, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 2}
    assert greedy(model, IDS, 12) == theirs.generate(torch.tensor([IDS]), **ends)[0, len(IDS) :].tolist()


def test_bf16_weights_become_float32(tmp_path: Path) -> None:
    model = load_reference(open_checkpoint(save_checkpoint(tmp_path, dtype=torch.bfloat16)))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_config_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, model=tiny_model("llama"))
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"intermediate_size": 100', '"intermediate_size": 104'))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight.*\[100, 72\].*\[104, 72\]"):
        load_reference(open_checkpoint(path))


def test_on_meta_nothing_is_allocated(saved: Path) -> None:
    assert {p.device.type for p in build_model(open_checkpoint(saved), "meta").parameters()} == {"meta"}
