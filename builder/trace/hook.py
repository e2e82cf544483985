"""The paged attention as transformers and torch.export see it: one operator, `llmc::attention`, without a kernel.

Comes in: what an attention module passes to its attention function. Goes out: `IMPLEMENTATION`, the name to ask for.
Must not know: graphs. What an attention function is asked for and this operator does not do raises UnsupportedError:
transformers passes masks, sinks and biases the same way as options without meaning here, so unknown ones are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from llmc.artifacts.errors import UnsupportedError

IMPLEMENTATION = "llmc_paged"

#: Options that change nothing for causal attention over the paged cache in evaluation mode.
_MEANINGLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
     "return_dict", "past_key_value", "past_key_values", "dropout", "deterministic", "position_embeddings", "layer_idx",
     "is_causal", "labels", "num_items_in_batch"}
)  # fmt: skip
#: Layer types in which attention sees all that came before; "hybrid": beside a recurrence.
_FULL = ("full_attention", "hybrid")


@torch.library.custom_op("llmc::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    slopes: list[float] | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [1,H,T,D], k [1,KH,T,D], v [1,KH,T,DV], slopes and sinks [H] -> [1,T,H,DV]; only ever traced."""
    raise NotImplementedError("llmc::attention stands in traced graphs and has no kernel in PyTorch")


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float, window: int | None,
      softcap: float | None, chunk: int | None, slopes: list[float] | None,
      sinks: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
            scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
            s_aux: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    kind = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedError(f"{kind} has no layer_idx: the layer that its cache belongs to is unknown")
    where = f"{kind} of layer {layer}"
    causal = options.get("is_causal")
    if attention_mask is not None or (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise UnsupportedError(f"{where} attends with a mask of its own; only causal attention can be compiled")
    extra = sorted(name for name, given in options.items() if given is not None and name not in _MEANINGLESS)
    if extra:
        raise UnsupportedError(f"{where} passes {', '.join(extra)} to its attention, which cannot be compiled")
    window, chunk = _window(module, layer, sliding_window, where)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.reshape(-1)
    return torch.ops.llmc.attention(query, key, value, layer, scale, window, softcap, chunk, None, sinks), None


def _window(module: Any, layer: int, given: int | None, where: str) -> tuple[int | None, int | None]:
    """(sliding window, chunk): what is passed, or what the config says where the model leaves it to the mask."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    kind = types[layer] if types and layer < len(types) else None
    if kind == "sliding_attention":
        return given or getattr(module, "sliding_window", None) or config.sliding_window, None
    if kind == "chunked_attention":
        return None, config.attention_chunk_size
    if kind not in (None, *_FULL):
        raise UnsupportedError(f"{where} is of type {kind!r}; only full, sliding and chunked attention can be compiled")
    return (None if kind in _FULL else given), None


AttentionInterface.register(IMPLEMENTATION, _attend)
