"""GGUF files read as the Hugging Face model that they were made from."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.checkpoint import TensorInfo, open_checkpoint
from tests.unit.checkpoint.conftest import write_gguf

Gguf = tuple[Path, dict[str, np.ndarray]]


def test_every_tensor_is_the_dequantised_original(gguf: Gguf) -> None:
    path, weights = gguf
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "gguf"
    assert set(checkpoint.tensors) == set(weights)
    for name, want in weights.items():
        assert checkpoint.tensors[name] == TensorInfo("f32", want.shape)
        assert np.array_equal(checkpoint.read(name), want), name
        assert np.array_equal(checkpoint.read(name, 3, 5), want[3:5]), name
    assert "lm_head.weight" not in checkpoint.tensors  # tied: stored once


def test_tensors_equal_transformers_own_conversion(gguf: Gguf) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from llmc.builder.reference import build_model

    checkpoint = open_checkpoint(gguf[0])
    theirs = load_gguf_checkpoint(str(gguf[0]), return_tensors=True, model_to_load=build_model(checkpoint, "meta"))
    for name, tensor in theirs["tensors"].items():
        assert np.array_equal(checkpoint.read(name), tensor.numpy()), name


def test_the_config_is_the_one_that_transformers_reads_off_the_file(gguf: Gguf) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(str(gguf[0].parent), gguf_file=gguf[0].name).to_diff_dict()
    theirs.pop("_model_name_or_path", None)  # which file it was
    assert open_checkpoint(gguf[0]).hf_config().to_diff_dict() == {**theirs, "architectures": ["LlamaForCausalLM"]}


def test_config_and_model_info(gguf: Gguf) -> None:
    checkpoint = open_checkpoint(gguf[0])
    config = checkpoint.hf_config()
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim, config.tie_word_embeddings) == (
        64,
        2,
        16,
        True,
    )
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert str(gguf[0].parent) not in json.dumps(checkpoint.config)
    info = checkpoint.model_info()
    assert (info.name, info.eos_token_ids, info.bos_token_id, info.add_bos) == ("tiny", (1, 5), 0, True)
    assert info.num_parameters == sum(w.size for w in gguf[1].values())
    assert checkpoint.chat_template == "{{ messages[0]['content'] }}"
    assert checkpoint.tokenizer_config["eos_token"] == "</s>"


def test_the_tokenizer_is_the_one_that_it_was_made_from(gguf: Gguf) -> None:
    from tests.models import tiny_tokenizer

    tokenizer = Tokenizer.from_str(open_checkpoint(gguf[0]).tokenizer_json.decode())
    for text in ("the fox thinks of 1234 others", "  <|user|>ünïcode\n"):
        assert tokenizer.encode(text).ids == tiny_tokenizer()(text).input_ids


def test_digits_are_cut_apart_where_the_vocabulary_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "digits.gguf", pre="smollm")
    tokenizer = Tokenizer.from_str(open_checkpoint(tmp_path / "digits.gguf").tokenizer_json.decode())
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in 2024²")] == [
        "in",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        "Â²",
    ]


def test_what_the_conversion_would_lose_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, pre="nosuch-split")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre is 'nosuch-split'"):
        open_checkpoint(path).model_info()
    write_gguf(path, extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedError, match=r"llama\.rope\.scaling\.type is 'yarn'"):
        open_checkpoint(path)


def test_the_pin_is_of_the_one_file(gguf: Gguf) -> None:
    pin = open_checkpoint(gguf[0]).pin()
    assert [(f.name, f.size) for f in pin.files] == [("tiny.gguf", gguf[0].stat().st_size)]


@pytest.mark.real_model
def test_the_real_file(real_gguf: Path) -> None:
    checkpoint = open_checkpoint(real_gguf)
    info = checkpoint.model_info()
    assert (info.architecture, info.num_parameters, info.vocab_size) == ("LlamaForCausalLM", 134515008, 49152)
    assert (info.eos_token_ids, info.bos_token_id, info.add_bos) == ((2,), 1, False)
    assert len(checkpoint.tensors) == 272
    assert checkpoint.read("model.layers.29.self_attn.k_proj.weight").shape == (192, 576)
