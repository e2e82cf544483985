"""The Hugging Face model at float32: the truth from outside that engines are held against.

Comes in: a `Checkpoint`. Goes out: the stock torch module with the checkpoint's weights, its logits and greedy tokens.
Must not know: graphs, plans, kernels.

The weights come through `Checkpoint.read`, not `from_pretrained`: the same bytes that the engine is built from, and a
GGUF loads in seconds instead of minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


def build_model(checkpoint: Checkpoint, device: str) -> Any:
    """The causal model of the checkpoint's config, float32, eval, without weights: on "meta", or on "cpu" unset."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = checkpoint.hf_config()
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(f"{checkpoint.path}: transformers has no causal language model of {config.model_type!r}")
    with no_init_weights(), torch.device(device):
        # Eager attention does what each model defines (soft caps, windows); the fused ones leave some of it out.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.tie_weights()
    return model.eval()


def parameter_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Every parameter name -> all names of the parameter: a tied one has several, and is stored under any of them."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def load_reference(checkpoint: Checkpoint) -> Any:
    """The torch module with the checkpoint's weights as float32; raises CheckpointError for what does not fit."""
    import torch

    model = build_model(checkpoint, "cpu")
    parameters = {
        next(filter(checkpoint.holds, names), names[0]): model.get_parameter(names[0])
        for names in dict.fromkeys(parameter_names(model).values())
    }
    checkpoint.check((name, tuple(p.shape)) for name, p in parameters.items())
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = checkpoint.read(name)
            if not np.issubdtype(value.dtype, np.floating) and value.dtype.kind != "V":
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {name!r} has dtype {value.dtype}, a float is expected"
                )
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value, np.float32)))
    return model.requires_grad_(False)


def logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """f32[T, V]: the logits behind each of the T tokens."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow, each the first with the highest logit; it does not stop at an end token."""
    import torch

    tokens: list[int] = []
    cache: Any = None
    step: torch.Tensor = torch.tensor([list(ids)])
    with torch.inference_mode():
        while len(tokens) < count:
            out = model(step, cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            tokens.append(int(out.logits[0, -1].argmax()))
            step = torch.tensor([[tokens[-1]]])
    return tokens
