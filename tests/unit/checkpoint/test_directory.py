"""Hugging Face directories: what is read, in which dtype, under which names, and what the pin covers."""

import hashlib
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint import TensorInfo, open_checkpoint
from llmc.builder.checkpoint.checkpoint import UNLIMITED
from llmc.builder.reference import load_reference, logits
from llmc.builder.trace import trace
from tests.models import CHAT_TEMPLATE, save_checkpoint, tiny_model

EMBED = "model.embed_tokens.weight"


def test_tensors_are_read_by_name_rows_and_dtype(tmp_path: Path) -> None:
    model = tiny_model("llama")
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, model=model, dtype=torch.bfloat16))
    assert checkpoint.format == "huggingface"
    assert checkpoint.tensors[EMBED] == TensorInfo("bf16", (300, 72))
    want = model.get_parameter(EMBED).detach().float().numpy()
    got = checkpoint.read(EMBED)
    assert got.dtype == ml_dtypes.bfloat16
    assert np.array_equal(got.astype(np.float32), want)
    assert np.array_equal(checkpoint.read(EMBED, 7, 9).astype(np.float32), want[7:9])
    assert np.array_equal(checkpoint.read(EMBED, -2).astype(np.float32), want[-2:])
    assert checkpoint.read(EMBED, 9, 7).shape == (0, 72)


def test_shards_read_as_one(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    path = save_checkpoint(tmp_path, model=model, max_shard_size="50KB")
    checkpoint = open_checkpoint(path)
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    assert len(shards) > 1
    assert set(shards) | {"model.safetensors.index.json"} <= {file.name for file in checkpoint.pin().files}
    for name, parameter in model.named_parameters():
        assert np.array_equal(checkpoint.read(name), parameter.detach().numpy()), name
    assert checkpoint.model_info().num_parameters == sum(p.numel() for p in model.parameters())


def test_opening_reads_no_weights(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "fromfile", lambda *a, **k: pytest.fail("weights were read"))
    checkpoint = open_checkpoint(saved)
    assert len(checkpoint.tensors) == 20
    assert checkpoint.tensors[EMBED].shape == (300, 72)


def test_a_tied_head_is_needed_only_where_the_config_does_not_tie(saved: Path, tmp_path: Path) -> None:
    head = load_reference(open_checkpoint(saved)).lm_head.weight
    assert np.array_equal(head.numpy(), open_checkpoint(saved).read(EMBED))
    shutil.copytree(saved, tmp_path / "untied")
    edit_config(tmp_path / "untied", tie_word_embeddings=False)
    untied = open_checkpoint(tmp_path / "untied")
    for use in (load_reference, trace):
        with pytest.raises(CheckpointError, match=r"no tensor '?lm_head\.weight"):
            use(untied)


def test_a_tied_tensor_may_be_stored_under_its_other_name(saved: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(saved, tmp_path / "other")
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop(EMBED)
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    first, second = (load_reference(open_checkpoint(path)) for path in (saved, tmp_path / "other"))
    assert np.array_equal(logits(first, [5, 6, 7]), logits(second, [5, 6, 7]))
    assert "load('lm_head.weight')" in str(trace(open_checkpoint(tmp_path / "other")).graph)


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    path = save_checkpoint(tmp_path, model=model)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    save_file({k.removeprefix("transformer."): v for k, v in tensors.items()}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.resolve("transformer.h.0.attn.c_attn.weight") == "h.0.attn.c_attn.weight"
    with torch.inference_mode():
        want = model(torch.tensor([[5, 6, 7]])).logits[0].numpy()
    np.testing.assert_allclose(logits(load_reference(checkpoint), [5, 6, 7]), want, rtol=1e-5, atol=1e-5)


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_the_pin_covers_exactly_what_is_read(saved: Path, tmp_path: Path) -> None:
    pin = open_checkpoint(saved).pin()
    assert {f.name for f in pin.files} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    }
    lines = "".join(f"{f.sha256}  {f.name}\n" for f in sorted(pin.files, key=lambda f: f.name))
    assert pin.digest == hashlib.sha256(lines.encode()).hexdigest()
    for file in pin.files:
        raw = (saved / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "README.md").write_text("unrelated")
    assert open_checkpoint(copy).digest == pin.digest
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    assert open_checkpoint(copy).digest != pin.digest


def test_model_info_unites_the_ends_of_all_three_files(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "tiny-llama")
    edit_config(copy, eos_token_id=[1, 9])
    (copy / "generation_config.json").write_text('{"eos_token_id": [4]}')
    tokenizer_config = json.loads((copy / "tokenizer_config.json").read_text()) | {"eos_token": "<pad>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    info = open_checkpoint(copy).model_info()
    assert info.eos_token_ids == (1, 2, 4, 9)
    assert (info.name, info.model_type, info.architecture) == ("llama-0.1M", "llama", "LlamaForCausalLM")
    assert (info.vocab_size, info.max_position_embeddings, info.bos_token_id, info.add_bos) == (300, 256, 0, True)


def test_model_info_knows_fields_by_their_family_names(tmp_path: Path) -> None:
    info = open_checkpoint(save_checkpoint(tmp_path, "gpt2")).model_info()
    assert (info.max_position_embeddings, info.vocab_size) == (256, 300)  # n_positions of GPT-2


@pytest.mark.parametrize(("limit", "expected"), [(512, 512), (10**30, None)])
def test_a_model_without_a_limit_takes_what_its_tokenizer_says(
    tmp_path: Path, limit: int, expected: int | None
) -> None:
    saved = save_checkpoint(tmp_path)
    config = json.loads((saved / "config.json").read_text())
    del config["max_position_embeddings"]
    (saved / "config.json").write_text(json.dumps(config | {"model_type": "bloom", "n_head": 6}))
    text = json.loads((saved / "tokenizer_config.json").read_text())
    (saved / "tokenizer_config.json").write_text(json.dumps(text | {"model_max_length": limit}))
    checkpoint = open_checkpoint(saved)
    assert checkpoint.longest == expected
    assert checkpoint.model_info().max_position_embeddings == (expected or UNLIMITED)


def test_the_chat_template_comes_from_either_file(saved: Path, tmp_path: Path) -> None:
    assert open_checkpoint(saved).chat_template == CHAT_TEMPLATE
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(copy).chat_template == "yes"
    (copy / "tokenizer_config.json").unlink()
    assert open_checkpoint(copy).chat_template is None


def test_a_model_type_that_transformers_lacks_is_named(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "copy")
    edit_config(copy, model_type="nosuch", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(UnsupportedError, match=r"'nosuch'.*never run"):
        open_checkpoint(copy).hf_config()


def test_quantized_directories_are_refused(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "copy")
    edit_config(copy, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match="gptq"):
        open_checkpoint(copy)
