"""Rotary frequencies that depend on how long a sequence is, fixed for the longest that is served.

Comes in: a model, the longest sequence. Goes out: the same model, whose rotary modules no longer look at positions to
choose. Must not know: any model family; the rules are transformers' own, by `rope_type`.

transformers chooses anew for each call, by the largest position in it. Keys that a cache holds were rotated by what was
chosen when they were computed, so an engine chooses once, as vLLM does: LongRoPE (arXiv 2402.13753) takes its long
factors where the longest sequence exceeds `original_max_position_embeddings`, its short ones otherwise; dynamic NTK
scaling has a base that grows with the longest sequence beyond `max_position_embeddings`, which a profile must ask for
(`max_seq_len`, up to `factor` times as many). Engine and transformers differ where what long sequences need is served
to one that is still short: the build says so (`note`), its gate compares with the model as served, and a profile with
that `max_seq_len` builds an engine that has what short ones need.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

#: The rules that choose by length.
_BY_LENGTH = ("dynamic", "longrope")
#: Those that are known not to.
_FIXED = ("default", "linear", "llama3", "yarn", "proportional")


def may_depend_on_length(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a rule that is not known to be fixed, in any of its fields.

    Older configs call the rule `type`.
    """
    return any(
        may_depend_on_length(value)
        if isinstance(value, Mapping)
        else key in ("rope_type", "type") and value not in _FIXED
        for key, value in config.items()
    )


def fix(model: torch.nn.Module, longest: int | None) -> str:
    """Gives rotary modules the frequencies for sequences of up to `longest` tokens; None: of what the config allows.

    Returns what the user should know, if short sequences would have others in transformers; else "".
    """
    note = ""
    for module in model.modules():
        rule = getattr(module, "rope_type", None)
        rules = rule if isinstance(rule, dict) else {None: rule}
        chosen = {layer_type: kind for layer_type, kind in rules.items() if kind in _BY_LENGTH}
        for layer_type, kind in chosen.items():
            config: Any = module.config
            length = longest or config.max_position_embeddings
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, layer_type=layer_type)
            short, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=1, layer_type=layer_type)
            with torch.no_grad():
                getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq").copy_(frequencies)
            if not torch.equal(frequencies, short):
                note = (
                    f"rotary frequencies ({kind}) are those of sequences of {length} tokens, in shorter ones as well, "
                    "for which transformers takes others; a profile with a smaller max_seq_len has those"
                )
        if chosen:
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
    return note
