"""Tiny random Hugging Face models of the families that most tests use, and checkpoints made from them.

`FAMILIES` names them; `tiny_config`, `tiny_model` and `save_checkpoint` take a name and overrides of config fields.
Where `llmc.tiny` shrinks the config of any model, the sizes here are chosen: heads that do not divide evenly over two
ranks, head dimensions beside the vector width, a sliding window shorter than the prompts of the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from llmc.tiny import BOS, EOS, PAD, VOCAB, WINDOW
from llmc.tiny_model import CHAT_TEMPLATE, random_model, save_tiny, tiny_tokenizer

__all__ = ["BOS", "CHAT_TEMPLATE", "EOS", "FAMILIES", "LATENT_FAMILIES", "PAD", "VOCAB", "WINDOW", "save_checkpoint",
           "tiny_config", "tiny_model", "tiny_tokenizer"]  # fmt: skip

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

#: Multi-head latent attention, all layers dense. In v2 the query has no low rank and rotation is complex arithmetic.
_MLA = {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3,
        "kv_lora_rank": 40, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 2, "tie_word_embeddings": False}  # fmt: skip
_CONFIGS |= {
    "deepseek_v2": {**_MLA, "q_lora_rank": None},
    "deepseek_v3": {**_MLA, "q_lora_rank": 28,
                    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
                                        "mscale_all_dim": 0.8, "original_max_position_embeddings": 64}},
}  # fmt: skip
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")

#: Recurrences: short convolutions, Mamba-2 alone, Mamba, Mamba-2 beside attention, the gated delta rule.
_MIXED = {"hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 2,
          "tie_word_embeddings": False}  # fmt: skip
_CONFIGS |= {
    "lfm2": {**_MIXED, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mamba2": {"hidden_size": 48, "num_heads": 4, "head_dim": 24, "expand": 2, "state_size": 24, "n_groups": 2,
               "chunk_size": 8, "tie_word_embeddings": True},
    "mamba": {"hidden_size": 40, "state_size": 6, "time_step_rank": 5, "tie_word_embeddings": True},
    "falcon_h1": {**_MIXED, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
                  "mamba_d_state": 24, "mamba_chunk_size": 8, "head_dim": 16},
    "olmo_hybrid": {**_MIXED, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                    "linear_num_key_heads": 2, "linear_key_head_dim": 20, "linear_value_head_dim": 24},
}  # fmt: skip
#: One whose recurrence no operator here computes.
_CONFIGS["recurrent_gemma"] = {**_MIXED, "lru_width": 64, "block_types": ["recurrent", "attention"]}
RECURRENT_FAMILIES = ("lfm2", "mamba2", "mamba", "falcon_h1", "olmo_hybrid")


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The config of a family's tiny model; `overrides` are fields of its Hugging Face config."""
    return AutoConfig.for_model(family, **{**_SHARED, **_CONFIGS[family], **overrides})


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The family's tiny model in float32 and evaluation mode; the same arguments give the same weights."""
    return random_model(tiny_config(family, **overrides), seed)


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
    model = tiny_model(family, seed, **overrides) if model is None else model
    return save_tiny(Path(directory), model, dtype, max_shard_size)
