"""Checkpoints made once for the tests of this folder: a directory, and a GGUF file."""

from pathlib import Path

import numpy as np
import pytest

from tests.models import VOCAB, save_checkpoint, tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as one safetensors file; not to be changed."""
    return save_checkpoint(tmp_path_factory.mktemp("saved") / "tiny-llama", "llama")


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of a GGUF's rotary pairs: what its converter does to q and k of Llama."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, *, pre: str = "gpt-2", extra: dict[str, float | str] | None = None) -> dict[str, np.ndarray]:
    """Writes the tiny Llama (4 heads of 16, so that blocks of 32 fit) as a GGUF; returns its weights by HF names."""
    from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
    from gguf.constants import MODEL_ARCH
    from gguf.quants import dequantize, quantize

    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    _write_tokenizer(writer, pre)
    names, weights = get_tensor_name_map(MODEL_ARCH.LLAMA, 2), {}
    for name, parameter in model.named_parameters():
        value, stem = parameter.detach().numpy(), name.removesuffix(".weight")
        kind = GGMLQuantizationType.Q8_0 if value.ndim == 2 else GGMLQuantizationType.F32
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        stored = quantize(permuted(value, heads) if heads else value, kind)
        writer.add_tensor(names.get_name(stem) + ".weight", stored, raw_dtype=kind)
        # Rows move whole, so that quantising before or after the permutation is the same.
        weights[name] = dequantize(quantize(value, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _write_tokenizer(writer: object, pre: str) -> None:
    import json

    backend = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokens = [token for token, _ in sorted(backend["model"]["vocab"].items(), key=lambda item: item[1])]
    assert len(tokens) == VOCAB
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 6 else 1 for i in range(VOCAB)])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(5)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny GGUF and its weights by Hugging Face names; not to be changed."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)
