"""Mixture-of-experts layers as transformers and torch.export see them: two operators `llmc::grouped_linear` a layer,
and between them whatever the module does to gate and up.

Comes in: an experts module and what its experts interface is given. Goes out: `IMPLEMENTATION`, the name to ask for.
Must not know: graphs, model families. How a module stores its weights follows from what `use_experts_implementation`
has noted on it, and from its parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmc.artifacts.errors import UnsupportedError

IMPLEMENTATION = "llmc_grouped"


@torch.library.custom_op("llmc::grouped_linear", mutates_args=())
def grouped_linear(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mix: torch.Tensor | None,
    name: str,
) -> torch.Tensor:
    """x [T,K] or [T,k,K], index [T,k], weight [E,N,K], bias [E,N] -> [T,k,N]; or with `mix` [T,k] the weighted sums
    [T,N]. `name` is the parameter's, in its module. Only ever traced.
    """
    raise NotImplementedError("llmc::grouped_linear stands in traced graphs and has no kernel in PyTorch")


@grouped_linear.register_fake
def _(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
      mix: torch.Tensor | None, name: str) -> torch.Tensor:  # fmt: skip
    outputs = (weight.shape[1],)
    return x.new_empty((*index.shape, *outputs) if mix is None else (index.shape[0], *outputs))


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T,H], top_k_index and top_k_weights [T,k] -> [T,H]."""
    wide = _linear(module, hidden_states, top_k_index, None, "gate_up_proj" if module.has_gate else "up_proj")
    rows = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
    if not module.has_post_expert_norm:
        return _linear(module, rows, top_k_index, top_k_weights, "down_proj")
    results = module.post_expert_norm(_linear(module, rows, top_k_index, None, "down_proj"))
    return (results * top_k_weights.unsqueeze(-1)).sum(dim=1)


def _linear(module: Any, x: torch.Tensor, index: torch.Tensor, mix: torch.Tensor | None, name: str) -> torch.Tensor:
    weight = _parameter(module, name, 3)
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    bias = _parameter(module, f"{name}_bias", 2) if module.has_bias else None
    return torch.ops.llmc.grouped_linear(x, index, weight, bias, mix, name)


def _parameter(module: Any, name: str, rank: int) -> torch.Tensor:
    value = getattr(module, name, None)
    if not isinstance(value, torch.Tensor) or value.dim() != rank:
        raise UnsupportedError(
            f"{type(module).__name__} has no parameter {name} with {rank} axes, so where its experts are is unknown"
        )
    return value


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
