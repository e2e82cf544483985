"""A plan with a real tokenizer and no code: enough for everything in front of the core."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmc.artifacts.plan import PlanWriter
from llmc.artifacts.schema import (
    FORMAT_VERSION,
    BuildInfo,
    CheckpointPin,
    Manifest,
    ModelInfo,
    ShapeProfile,
    Target,
    TokenRange,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|hang|>", "<|die|>", "<|refuse|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["The capital of France is Paris.", "one two three four five six seven eight", "stop here STOP now", "\n \t"]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer


@functools.cache
def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁cat", "s", "at", "e", "a"]
    pieces += ["▁▁", "▁sat", "é", "日", "本"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_plan(path: Path, *, template: str = TEMPLATE, max_seq_len: int = 512, **model: object) -> Path:
    tokenizer = byte_level()
    info = {
        "name": "fake",
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "num_parameters": 0,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_seq_len,
        "eos_token_ids": (tokenizer.token_to_id("<|im_end|>"),),
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "add_bos": False,
    }
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    with PlanWriter(path) as writer:
        writer.add("tokenizer/tokenizer.json", tokenizer.to_str().encode())
        writer.add("tokenizer/tokenizer_config.json", json.dumps(config).encode())
        writer.add("tokenizer/generation_config.json", json.dumps({"temperature": 0.7, "top_k": None}).encode())
        if template:
            writer.add("tokenizer/chat_template.jinja", template.encode())
        writer.seal(
            Manifest(
                FORMAT_VERSION,
                CheckpointPin("c" * 64, "huggingface", ()),
                Target("cpu", "x86-64-v3"),
                ModelInfo(**{**info, **model}),  # type: ignore[arg-type]
                ShapeProfile("test", (TokenRange(1, 8, 64),), 8, max_seq_len, 16),
                BuildInfo("llmc test", "g++", (), "fp32", "f32", 1),
                (),
                "weights/shared.bin",
                0,
                0,
                1,
                (),
            )
        )
        return writer.publish()
