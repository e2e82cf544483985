"""Random checkpoints of a Llama of any size, written a block at a time: for measuring memory and speed.

Comes in: a Hugging Face config's fields. Goes out: a folder of sharded safetensors, bf16 or FP8 with a scale a row
(compressed-tensors' float-quantized), or a GGUF file of the same shape. Nothing of the size of the model is held.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SHARD = 1 << 30
_BLOCK = 1 << 22
_DTYPES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
#: What compressed-tensors writes for FP8 weights with a scale a row and inputs as they are.
_FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}}},
}  # fmt: skip
_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}

#: Name, safetensors dtype, shape.
Tensor = tuple[str, str, tuple[int, ...]]


def _matrices(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """A layer's linear layers: Hugging Face's name, llama.cpp's, shape."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv = hidden // heads * kv_heads
    yield "self_attn.q_proj", "attn_q", (hidden, hidden)
    yield "self_attn.k_proj", "attn_k", (kv, hidden)
    yield "self_attn.v_proj", "attn_v", (kv, hidden)
    yield "self_attn.o_proj", "attn_output", (hidden, hidden)
    yield "mlp.gate_proj", "ffn_gate", (ffn, hidden)
    yield "mlp.up_proj", "ffn_up", (ffn, hidden)
    yield "mlp.down_proj", "ffn_down", (hidden, ffn)


def _tensors(config: Mapping[str, Any], fp8: bool) -> Iterator[Tensor]:
    """In the order in which they are written."""
    table = (config["vocab_size"], config["hidden_size"])
    yield "model.embed_tokens.weight", "BF16", table
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, _, shape in _matrices(config):
            yield f"{prefix}.{name}.weight", "F8_E4M3" if fp8 else "BF16", shape
            if fp8:
                yield f"{prefix}.{name}.weight_scale", "F32", (shape[0], 1)
        yield f"{prefix}.input_layernorm.weight", "BF16", (config["hidden_size"],)
        yield f"{prefix}.post_attention_layernorm.weight", "BF16", (config["hidden_size"],)
    yield "model.norm.weight", "BF16", (config["hidden_size"],)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "BF16", table


def make_checkpoint(folder: Path, config: Mapping[str, Any], *, fp8: bool = False, dynamic: bool = False) -> Path:
    """Writes the checkpoint with a tokenizer of a few words. `dynamic`: inputs of FP8 layers are FP8 too, by token."""
    from transformers import AutoConfig

    from tests.models import tiny_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    quantization = copy.deepcopy(_FP8)
    if dynamic:
        quantization["config_groups"]["group_0"]["input_activations"] = _DYNAMIC
    extra = {"quantization_config": quantization} if fp8 else {}
    named = AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], dtype="bfloat16", **config, **extra)
    named.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    shards: list[list[Tensor]] = [[]]
    for tensor in _tensors(config, fp8):
        if sum(map(_nbytes, shards[-1])) > _SHARD:
            shards.append([])
        shards[-1].append(tensor)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {tensor[0]: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rng = np.random.default_rng(0)
    for file, shard in zip(files, shards, strict=True):
        _write_shard(folder / file, shard, rng)
    return folder


def _nbytes(tensor: Tensor) -> int:
    _, dtype, shape = tensor
    return _DTYPES[dtype] * math.prod(shape)


def _write_shard(path: Path, tensors: Sequence[Tensor], rng: np.random.Generator) -> None:
    header, at = {}, 0
    for tensor in tensors:
        name, dtype, shape = tensor
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + _nbytes(tensor)]}
        at += _nbytes(tensor)
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, dtype, shape in tensors:
            for start in range(0, math.prod(shape), _BLOCK):
                file.write(_random(dtype, min(_BLOCK, math.prod(shape) - start), shape, rng).data)


def _random(dtype: str, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bits of numbers of a fan-in's size; ones for a vector, which is a norm's."""
    if dtype == "F32":  # the scale of a row of E4M3 below 2
        return np.full(count, 2.0 ** round(-0.5 * math.log2(shape[0])), np.float32)
    if dtype == "F8_E4M3":
        return rng.integers(0, 1 << 8, count, np.uint8) & np.uint8(0xBF)
    if len(shape) == 1:
        return np.full(count, 0x3F80, np.uint16)
    exponent = 127 + round(-0.5 * math.log2(shape[1]))
    return (rng.integers(0, 1 << 16, count, np.uint16) & np.uint16(0x807F)) | np.uint16(exponent << 7)


def make_gguf(path: Path, config: Mapping[str, Any], kind: str) -> Path:
    """Writes the same shape for llama.cpp, without a vocabulary; `kind` is F16 or Q8_0."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    file_types = {"F16": LlamaFileType.MOSTLY_F16, "Q8_0": LlamaFileType.MOSTLY_Q8_0}
    writer = GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_file_type(file_types[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rng, wanted = np.random.default_rng(0), GGMLQuantizationType[kind]

    def matrix(name: str, shape: tuple[int, int]) -> None:
        writer.add_tensor(f"{name}.weight", _random_blocks(kind, shape, rng), raw_dtype=wanted)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(config["hidden_size"], np.float32))

    matrix("token_embd", (config["vocab_size"], config["hidden_size"]))
    for layer in range(config["num_hidden_layers"]):
        for _, name, shape in _matrices(config):
            matrix(f"blk.{layer}.{name}", shape)
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
    norm("output_norm")
    if not config["tie_word_embeddings"]:
        matrix("output", (config["vocab_size"], config["hidden_size"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Rows as GGUF stores them: f16[N, K], or Q8_0's blocks u8[N, K/32*34], each a scale in f16 and 32 int8."""
    size = 2.0 ** round(-0.5 * math.log2(shape[1]))
    if kind == "F16":
        bits = rng.integers(0, 1 << 16, shape, np.uint16) & np.uint16(0x83FF)
        return (bits | np.float16(size).view(np.uint16)).view(np.float16)
    blocks = rng.integers(0, 1 << 8, (shape[0], shape[1] // 32, 34), np.uint8)
    blocks[..., :2] = np.asarray([size / 127], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)
