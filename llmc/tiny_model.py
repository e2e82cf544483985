"""Tiny random models, and checkpoints made from them in the form in which models are published.

Comes in: a model_type, or a config. Goes out: a model whose every weight counts, a checkpoint folder. Must not know:
any model family. Weights are spread by fan-in, so that activations are neither tiny nor saturated and each bias, norm
weight and softcap changes the logits.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from llmc.artifacts.errors import UnsupportedError
from llmc.tiny import BOS, EOS, PAD, SHAPES, VOCAB, WINDOW, tiny_config

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>")
_TEXT = ("the quick brown fox jumps over the lazy dog and then there are other things that the fox thinks of, "
         "one of them being the weather in the other valley where it would rather be with another brother")  # fmt: skip


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny model in float32 and evaluation mode, with eager attention; the same arguments give the same weights.

    The first of `SHAPES` that the model can have. Raises UnsupportedError where transformers cannot make it.
    """
    reasons = []
    for shape in SHAPES:
        try:
            config = tiny_config(model_type, shape, **overrides)
            return random_model(config, seed)
        except UnsupportedError as error:
            reasons.append(str(error))
    raise UnsupportedError(reasons[0])


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The causal language model of a config with random weights of which each counts; tried once."""
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
        )
        spread_weights(model, seed)
        model.eval()
        with torch.inference_mode():
            logits = model(torch.tensor([list(range(5, 5 + 2 * WINDOW))]), use_cache=False).logits
    except Exception as error:  # third-party model code: anything may come
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(f"{config.model_type}: transformers cannot run a small model of it: {reason}") from error
    if not torch.isfinite(logits).all():
        raise UnsupportedError(f"{config.model_type}: a small random model of it gives no finite logits")
    return model


def spread_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Gives every parameter and every stored buffer random values of a magnitude that matters."""
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict().keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * _spread(model, name, parameter))
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.2)
            else:  # a norm's weight, around 1 or, where the model adds that itself, around 0
                parameter.copy_(parameter.mean().round() + noise * 0.2)
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point() and name.endswith("bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)


def _spread(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of a matrix: by fan-in; an embedding's 1, less where it is the output matrix as well."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, torch.nn.Embedding):
        return 0.2 if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else 1.0
    if parameter.dim() > 2:  # a stack of experts' matrices, or a convolution
        return float(max(parameter.shape[1:]) ** -0.5)
    fan_in = parameter.shape[1] if isinstance(owner, torch.nn.Linear) else parameter.shape[0]
    return float(fan_in**-0.5)


# -- checkpoints


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


def save_tiny(
    directory: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB"
) -> Path:
    """Writes a checkpoint folder (config, safetensors, tokenizer, chat template, generation config) and returns it.

    The tensors have the names and the form in which transformers publishes them. `model` is converted to `dtype` in
    place; a small `max_shard_size` such as "50KB" gives several files.
    """
    if model.generation_config is not None:
        model.generation_config.update(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return directory
