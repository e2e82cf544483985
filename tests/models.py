"""Tiny random Hugging Face models of every family that the compiler is tested with, and checkpoints made from them.

`FAMILIES` names them; `tiny_config`, `tiny_model` and `save_checkpoint` take a name and overrides of config fields.
Sizes are odd on purpose: heads that do not divide evenly over two ranks, head dimensions beside the vector width, a
sliding window shorter than the prompts of the tests. Weights are scaled by fan-in, so that activations are neither tiny
nor saturated and each bias, norm weight and softcap changes the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 300
#: Tokens that mistral and, in every other layer, gemma2 see.
WINDOW = 8
BOS, EOS, PAD = 0, 1, 2

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 9, "num_key_value_heads": 3,
              "tie_word_embeddings": True},
    "qwen2": {"hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 2,
              "tie_word_embeddings": False},
    "qwen3": {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "tie_word_embeddings": False},
    "mistral": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
                "head_dim": 16, "sliding_window": WINDOW, "tie_word_embeddings": False},
    "gemma2": {"hidden_size": 56, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2,
               "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "attn_logit_softcapping": 3.0,
               "final_logit_softcapping": 4.0, "tie_word_embeddings": True},
    "phi3": {"hidden_size": 64, "intermediate_size": 92, "num_attention_heads": 4, "num_key_value_heads": 2,
             "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
    "gpt2": {"n_embd": 48, "n_inner": 96, "n_head": 4, "tie_word_embeddings": True},
}  # fmt: skip

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>")
_TEXT = ("the quick brown fox jumps over the lazy dog and then there are other things that the fox thinks of, "
         "one of them being the weather in the other valley where it would rather be with another brother")  # fmt: skip


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The config of a family's tiny model; `overrides` are fields of its Hugging Face config."""
    return AutoConfig.for_model(family, **{**_SHARED, **_CONFIGS[family], **overrides})


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The family's tiny model in float32 and evaluation mode; the same arguments give the same weights."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * _spread(model, name, parameter))
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.2)
            else:  # a norm's weight, around 1 or, where the model adds that itself, around 0
                parameter.copy_(parameter.mean().round() + noise * 0.2)
    return model.eval()


def _spread(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of a matrix: by fan-in; an embedding's 1, less where it is the output matrix as well."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, torch.nn.Embedding):
        return 0.2 if model.config.tie_word_embeddings else 1.0
    fan_in = parameter.shape[1] if isinstance(owner, torch.nn.Linear) else parameter.shape[0]
    return fan_in**-0.5


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB tokens: ids 0..5 are special, any text encodes; it puts BOS first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(_SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    if tokenizer.get_vocab_size() != VOCAB:
        raise AssertionError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB}: give it more text")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_checkpoint(
    directory: Path | str,
    family: str = "llama",
    seed: int = 0,
    *,
    model: PreTrainedModel | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a checkpoint directory (config, safetensors, tokenizer, chat template, generation config); returns it.

    `model` takes the place of `tiny_model(family, seed, **overrides)` and is converted to `dtype` in place; a small
    `max_shard_size` such as "50KB" gives several files.
    """
    directory = Path(directory)
    model = tiny_model(family, seed, **overrides) if model is None else model
    model.generation_config.update(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return directory
