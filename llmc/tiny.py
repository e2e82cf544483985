"""Tiny configs of any causal language model that transformers knows.

Comes in: a model_type of transformers' causal-LM mapping. Goes out: a small config. Must not know: any model
family: a config is shrunk field by field, by what a field's name says that it means.

Sizes are odd on purpose: 6 heads where the model allows it, head dimensions apart from hidden/heads, sliding windows
shorter than the prompts. Layers are cut to as few as keep one of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    PretrainedConfig,
)

from llmc.artifacts.errors import UnsupportedError, UsageError

VOCAB = 300
#: Tokens that a layer with a sliding window sees.
WINDOW = 8
#: Tokens that a tiny model can take.
LENGTH = 256
BOS, EOS, PAD = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    """Number of heads, and whether the size of a head is apart from hidden size / heads where the config has both."""

    heads: int
    apart: bool


#: What is tried, oddest first: some models want heads that divide evenly, or heads that fill the hidden size.
SHAPES = (Shape(6, True), Shape(6, False), Shape(4, False))


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one tiny model. `published`: the config's own hidden size; `kept`: the indices of its layers that
    remain.
    """

    hidden: int
    published: int
    heads: int
    kv_heads: int
    head_dim: int
    kept: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.kept)

    @property
    def inner(self) -> int:
        """Channels of a state-space mixer."""
        return 2 * self.hidden


_STATE_HEAD = 16

_Rule = int | Callable[[int, _Sizes], int]


def _at_most(limit: int) -> _Rule:
    return lambda old, _: min(old, limit)


#: What a whole number means by its field's name, first match counts. None, 0 and booleans are switches and stay.
_RULES: tuple[tuple[str, _Rule], ...] = (
    (r"\w*vocab_size\w*", VOCAB),
    (r"bos_token_id", BOS),
    (r"(forced_|decoder_)?eos_token_id|eod_token_id", EOS),
    (r"\w*token_id|\w*token_index|(pad|unk|mask|eos|bos)_index", PAD),
    (r"original_max_position_embeddings", 64),
    (r"max_\w*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length|model_max_length", LENGTH),
    (r"\w*(window|window_size|window_len|chunk_length)|attention_chunk_size|local_attention|mem_len", _at_most(WINDOW)),
    (r"\w*head_dim_factor", _at_most(2)),
    # attention
    (r"(num|n)_(key_value|kv)_heads|kv_n_heads|num_query_groups|swa_num_key_value_heads", lambda _, s: s.kv_heads),
    (r"((encoder|decoder)_)?(attention_heads|num_attention_heads|num_heads|n_heads?)|"
     r"(swa_)?num_attention_heads|num_(encoder|decoder)_attention_heads|index_n_heads", lambda _, s: s.heads),
    (r"qk_nope_head_dim", 12),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 20),
    (r"v_head_dim", 14),
    (r"(swa_|global_|index_|attention_)?head_dim|attention_head_size|kv_channels|dim_head|d_head|d_kv",
     lambda _, s: s.head_dim),
    (r"query_pre_attn_scalar", 24),
    (r"rotary_dim", lambda _, s: s.head_dim // 2),
    (r"q_lora_rank", 28),
    (r"kv_lora_rank", 20),
    (r"o_groups", 2),
    (r"\w*(lora|gate|gated_norm|laurel|adapter)_rank|hc_lowrank|d_rel", 10),
    # recurrent mixers
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"linear_key_head_dim|linear_head_dim", 8),
    (r"linear_value_head_dim", 12),
    (r"mamba_(n|num)_heads|n_mamba_heads", lambda _, s: s.inner // _STATE_HEAD),
    (r"mamba_(d_head|head_?dim)", _STATE_HEAD),
    (r"mamba_d_ssm", lambda _, s: s.inner),
    (r"(mamba_)?(n_?groups)", lambda old, s: 1 if old == 1 else 3 if s.inner // _STATE_HEAD % 3 == 0 else 2),
    (r"(mamba_d|ssm)?_?state(_size)?", 8),
    (r"\w*dt_rank|time_step_rank", 5),
    (r"(mamba_)?chunk_size|block_size", _at_most(16)),
    # experts
    (r"\w*experts_per_tok\w*|moe_topk?|moe_k|moe_top_k|top_k_experts|num_selected_experts", _at_most(3)),
    (r"n_group|num_expert_group", _at_most(4)),
    (r"topk_group", _at_most(2)),
    (r"\w*shared_experts?|moe_num_shared_experts", _at_most(2)),
    (r"zero_expert_num", 2),
    (r"\w*num_(local_|routed_)?experts|n_routed_experts", 8),
    # widths of the hidden layers of feed-forward parts
    (r"(moe|expert|shared_expert|moe_shared_expert|shared_experts|shared)_(ffn_)?(intermediate|hidden)_size", 44),
    (r"\w*intermediate_size\w*|\w*ffn_dim|\w*ffn_hidden_size|n_inner|dff|dim_ff|d_inner|feed_forward_size", 100),
    (r"moe_latent_size", 20),
    # width of the model
    (r"hidden_size_per_layer_input|ple_embed_dim", 12),
    (r"attention_hidden_size", lambda old, s: s.hidden * max(old // s.published, 1)),
    (r"hidden_size|cross_attention_hidden_size|n_embd|d_model|emb_dim|embedding_dim|"
     r"\w*embedding_size|word_embed_proj_dim|lru_width", lambda _, s: s.hidden),
    # layers
    (r"((num|n)_)?((encoder|decoder|hidden|input|output|recurrent)_)?(layers?|blocks)|num_layers_per_stack",
     lambda _, s: s.layers),
    (r"num_kv_shared_layers", lambda _, s: s.layers // 2),
    (r"moe_layer_end_index", lambda _, s: s.layers - 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|\w*_layer_offset", _at_most(1)),
    (r"\w*_layer_period|layer_group_size|sliding_window_pattern|global_attn_every_n_layers", _at_most(2)),
    (r"floor_scale|log_scaling_n_floor|index_topk|rel_extent|index_block_size", _at_most(16)),
)  # fmt: skip
#: Fields whose number counts the layers, most telling first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
#: Lists of indices of layers.
_INDICES = re.compile(r"\w*(layers|layer_ids|layer_idx|idxs|layer_indices)")
#: A field that says after how many layers a kind returns.
_PERIOD = re.compile(r"\w*_layer_period|layer_group_size|global_attn_every_n_layers")
_MOST_LAYERS = 6
#: Fields that are given a value also where the config has none.
_NEEDED = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "num_key_value_heads",
                     "num_experts_per_tok", "n_routed_experts", "n_shared_experts"})  # fmt: skip


def tiny_config(model_type: str, shape: Shape | None = None, **overrides: Any) -> PretrainedConfig:
    """The config of a tiny model. `overrides` are fields of the config as it is saved, set after shrinking.

    Raises UsageError for an unknown model_type, UnsupportedError where the config class refuses the small values.
    """
    if model_type not in CONFIG_MAPPING:
        raise UsageError(f"model type {model_type!r} is none that this transformers release knows")
    kind = CONFIG_MAPPING[model_type]
    try:
        fields = _shrunk(kind().to_dict(), shape or SHAPES[0])
        return kind.from_dict({**fields, **overrides})
    except Exception as error:  # each model's config class raises what it likes
        reason = " ".join(str(error).split())
        raise UnsupportedError(f"{model_type}: its config cannot be made small: {reason}") from error


def _shrunk(fields: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """A config's fields with small values. Configs inside it are shrunk by the same rules."""
    fields = _completed(fields)
    sizes = _sizes(fields, shape)
    kept = {name: value for name, value in fields.items() if name not in ("transformers_version", "dtype", "id2label",
                                                                         "label2id", "architectures")}  # fmt: skip
    return {name: _small(name, value, fields, sizes, shape) for name, value in kept.items()}


def _completed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with what every published config has and a default one lacks, though its model reads it."""
    complete = dict(fields)
    if complete.get("layer_types", ()) is None and "conv_L_cache" in complete:
        complete["layer_types"] = (["conv", "full_attention"] * 64)[: _first(complete, _LAYERS)]
    if "clip_qkv" in complete and "kv_n_heads" in complete:
        complete |= {"clip_qkv": complete["clip_qkv"] or 8.0, "rope_theta": complete.get("rope_theta", 10000.0)}
    return complete


def _sizes(fields: Mapping[str, Any], shape: Shape) -> _Sizes:
    many = _first(fields, _HEADS) or shape.heads
    attention = fields.get("attn_config")
    latent = isinstance(fields.get("qk_rope_head_dim"), int)
    kv = _first(fields, _KV_HEADS) or (_first(attention, _KV_HEADS) if isinstance(attention, Mapping) else None) or many
    hidden = 72 if shape.apart and ("head_dim" in fields or "kv_channels" in fields) else 16 * shape.heads
    mixer = "expand" in fields and _first(fields, _HEADS[:3]) is None  # its heads divide its channels
    return _Sizes(
        hidden=hidden,
        published=_first(fields, _HIDDEN) or hidden,
        heads=2 * hidden // _STATE_HEAD if mixer else shape.heads,
        kv_heads=1 if kv == 1 else shape.heads if kv == many else 2,
        head_dim=8 if latent else 16,
        kept=_kept(fields),
    )


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), None)


def _kept(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that remain: the first of each kind, at least two. A kind is what all lists over layers say of it."""
    count = _first(fields, _LAYERS) or 2
    lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == count]
    named = [v for name, v in fields.items() if _INDICES.fullmatch(name) and _is_indices(v, count)]
    if not lists and not named:
        periods = any(_PERIOD.fullmatch(name) and isinstance(value, int) for name, value in fields.items())
        return tuple(range(min(4 if periods else 2, count)))
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([v[index] for v in lists] + [index in v for v in named]), index)
    kept = sorted(kinds.values())[:_MOST_LAYERS]
    if fields.get("num_kv_shared_layers"):  # the later half takes keys and values from its kind in the earlier one
        return tuple(kept + kept)
    return tuple(kept) if len(kept) > 1 else (*kept, *(i for i in range(2) if i not in kept))[:2]


def _is_indices(value: Any, count: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and len(value) < count
        and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < count for v in value)
        and list(value) == sorted(set(value))
    )


def _small(name: str, value: Any, fields: Mapping[str, Any], sizes: _Sizes, shape: Shape) -> Any:
    count = _first(fields, _LAYERS)
    if isinstance(value, Mapping):
        if name.startswith("rope_"):
            return _small_rope(value, fields, sizes)
        if name == "per_layer_config":  # layer -> what differs there from the config
            named = {int(index): entry for index, entry in value.items()}
            return {str(new): _small_entry(named[old], fields, sizes, shape)
                    for new, old in enumerate(sizes.kept) if old in named}  # fmt: skip
        return _shrunk(value, shape) if name.endswith("_config") else value
    if isinstance(value, list | tuple):
        if len(value) == count:
            return [_small(name.removesuffix("_per_layer"), value[i], fields, sizes, shape) for i in sizes.kept]
        if count is not None and _INDICES.fullmatch(name) and _is_indices(value, count):
            return [new for new, old in enumerate(sizes.kept) if old in value]
        if name.endswith("token_id"):
            return [_number(name, value[0], sizes)] if value else value
        if name == "attention_types":  # [[[kinds], times]]: kinds in turn
            return [[kinds, max(sizes.layers // len(kinds), 1)] for kinds, _ in value]
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return _number(name, value, sizes)
    return _number(name, 1, sizes) if value is None and name in _NEEDED else value


def _small_entry(entry: Any, fields: Mapping[str, Any], sizes: _Sizes, shape: Shape) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {name: _small(name, value, fields, sizes, shape) for name, value in entry.items()}


def _number(name: str, value: int, sizes: _Sizes) -> int:
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, name):
            return rule if isinstance(rule, int) else rule(value, sizes)
    return value


def _small_rope(rope: Mapping[str, Any], fields: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Rotary parameters; or those of each kind of layer, by kind."""
    if all(isinstance(v, Mapping) for v in rope.values()):
        return {kind: _small_rope(v, fields, sizes) for kind, v in rope.items()}
    small = dict(rope)
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = 64
    rotated = int(sizes.head_dim * (small.get("partial_rotary_factor") or 1))
    for name in ("long_factor", "short_factor"):
        if small.get(name):
            small[name] = list(small[name])[: rotated // 2]
    if small.get("mrope_section"):
        parts = len(small["mrope_section"])
        rest = rotated // 2 - rotated // 2 // parts * (parts - 1)
        small["mrope_section"] = [rest, *[rotated // 2 // parts] * (parts - 1)]
    return small
