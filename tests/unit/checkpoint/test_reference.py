"""The reference is the model that `from_pretrained` loads, for every family, at float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import CheckpointError
from llmc.builder import reference, streamed
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.reference import batch_logits, build_model, forced, greedy, load_reference, logits
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


@pytest.mark.parametrize(("before", "usable", "after"), [(4, 2, 2), (2, 4, 2)])
def test_pytorch_takes_no_more_threads_than_it_may_and_was_told(
    saved: Path, monkeypatch: pytest.MonkeyPatch, before: int, usable: int, after: int
) -> None:
    own = torch.get_num_threads()
    monkeypatch.setattr(reference, "usable_cpus", lambda: usable)
    try:
        torch.set_num_threads(before)
        load_reference(open_checkpoint(saved))
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(own)


def test_on_meta_nothing_is_allocated(saved: Path) -> None:
    assert {p.device.type for p in build_model(open_checkpoint(saved), "meta").parameters()} == {"meta"}


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of a tiny model counts as large, and linear layers read a few rows at a time."""
    monkeypatch.setattr(reference, "_SMALL", 250)
    monkeypatch.setattr(streamed, "BLOCK", 4 * 64 * 7)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("tiny_blocks")
def test_weights_that_stay_in_the_checkpoint_give_the_same_model(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, family))
    whole, streaming = load_reference(checkpoint), load_reference(checkpoint, resident=0)
    large = [p for p in streaming.parameters() if p.dim() > 1]
    assert large
    for _ in range(2):  # the second pass finds nothing left of the first
        np.testing.assert_allclose(logits(streaming, IDS), logits(whole, IDS), rtol=1e-4, atol=1e-4)
        assert all(p.is_meta for p in large)
    assert greedy(streaming, IDS, 4) == greedy(whole, IDS, 4)


@pytest.mark.usefixtures("tiny_blocks")
def test_gradients_go_through_weights_that_are_not_in_memory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path))
    gradients = []
    for model in (load_reference(checkpoint), load_reference(checkpoint, resident=0)):
        x = torch.linspace(-1, 1, 5 * 72).view(1, 5, 72).requires_grad_()
        model(inputs_embeds=x, use_cache=False).logits.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pass_bytes", [1, 1 << 20])
def test_a_batch_gives_each_texts_own_logits(saved: Path, monkeypatch: pytest.MonkeyPatch, pass_bytes: int) -> None:
    monkeypatch.setattr(reference, "_PASS", pass_bytes)
    model = load_reference(open_checkpoint(saved))
    texts = [IDS, IDS[:5], IDS[3:11]]
    for ids, values in zip(texts, batch_logits(model, texts), strict=True):
        np.testing.assert_allclose(values, logits(model, ids), rtol=1e-4, atol=1e-4)


def test_forced_answers_show_where_an_answer_leaves_the_models_own(saved: Path) -> None:
    model = load_reference(open_checkpoint(saved))
    own = [greedy(model, ids, 6) for ids in (IDS, IDS[:4])]
    assert forced(model, [IDS, IDS[:4]], own) == own
    other = [*own[0][:2], (own[0][2] + 1) % 300, *own[0][3:]]
    assert forced(model, [IDS], [other])[0][:3] == own[0][:3]
