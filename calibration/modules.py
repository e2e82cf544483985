"""The linear modules of a torch model, and forwards put in their place for a while.

Comes in: a Hugging Face model, streamed or not. Goes out: its linear modules and its output head, their weights by
output channels. Must not know: families, what the other forwards measure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from llmc.builder.streamed import StreamedLinear, weight_blocks, weight_of

#: Elements of a weight that are worked on at once: an output head can have hundreds of millions.
_BLOCK = 1 << 22

#: A module's path and what it is called with -> its output.
Forward = Callable[..., torch.Tensor]


def linear_modules(model: Any) -> dict[str, nn.Module]:
    """Path -> module, in the model's order: torch's Linear and transformers' Conv1D, without the output head. A router
    that is a Linear and chooses as well has a forward of its own, and is none.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    products = (nn.Linear.forward, Conv1D.forward, StreamedLinear.forward)
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and type(module).forward in products and module is not head
    }


def head_path(model: Any) -> str | None:
    """The path of the output head; None where a model has none that is a linear module."""
    head = model.get_output_embeddings()
    return next((p for p, m in model.named_modules() if m is head and isinstance(m, nn.Linear)), None)


def by_outputs(module: nn.Module) -> torch.Tensor:
    """f32[N, K]: the module's weight with a row for each output; a Conv1D's is stored the other way round."""
    weight = weight_of(module)
    return weight if isinstance(module, nn.Linear) else weight.T


def row_blocks(module: nn.Module) -> Iterator[tuple[slice, torch.Tensor]]:
    """The same in runs of rows, each with where it stands."""
    if isinstance(module, nn.Linear):
        yield from weight_blocks(module, _BLOCK)
    else:
        weight = by_outputs(module)
        yield slice(0, len(weight)), weight


def shape_of(module: nn.Module) -> tuple[int, int]:
    """[N, K], without reading the weight."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)


def plus_bias(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """The module's output from its product."""
    bias = module._parameters.get("bias")
    return y if bias is None else y + bias


@contextlib.contextmanager
def replaced(modules: Mapping[str, nn.Module], forward: Forward) -> Iterator[None]:
    """Inside, each module calls `forward` with its path instead of its own."""
    for path, module in modules.items():
        module.forward = _bound(forward, path)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def _bound(forward: Forward, path: str) -> Forward:
    return lambda *args, **kwargs: forward(path, *args, **kwargs)
