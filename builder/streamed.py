"""A torch model whose large weights stay in the checkpoint: each is read when its module runs, and dropped after.

Comes in: a model with parameters on "meta", a `Checkpoint`, the recipe of each parameter's value. Goes out: the
same model, which runs (forward and backward) in the memory of its activations and a few blocks of weights. Must not
know: families, graphs, what the model is run for.

An embedding reads only the rows that are looked up, a linear layer multiplies by blocks of its rows; any other module
has its parameters read whole before its forward.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.recipe import Leaf, Load, Recipe
from llmc.builder.weights.stream import rows

#: Bytes of float32 that a linear layer reads at once.
BLOCK = 64 << 20
#: Of malloc.h.
_M_MMAP_THRESHOLD = -3


def read_float32(
    checkpoint: Checkpoint, recipe: Recipe, start: int | None = None, stop: int | None = None
) -> torch.Tensor:
    """Rows start:stop of a recipe's value. Raises CheckpointError for a stored tensor of whole numbers."""
    if not isinstance(recipe, Load):
        source = _Tensors(checkpoint)
        part = recipe if start is None or stop is None else rows(recipe, start, stop, source)
        return torch.from_numpy(np.ascontiguousarray(evaluate(part, source)))
    value = _Tensors(checkpoint).read(recipe.name, start, stop)
    if value.dtype.name == "bfloat16":  # torch converts it, and on all cores
        return torch.from_numpy(np.ascontiguousarray(value).view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(np.ascontiguousarray(value, np.float32))


@dataclass(frozen=True)
class _Tensors:
    """A checkpoint's tensors as the source of the recipes of parameters, which have no other leaves."""

    checkpoint: Checkpoint

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return tuple(self.checkpoint.tensors[leaf.name].shape)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        value = self.checkpoint.read(name, start, stop)
        if not np.issubdtype(value.dtype, np.floating) and value.dtype.kind != "V":
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name!r} has dtype {value.dtype}, a float is expected"
            )
        return value

    def stored(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        raise AssertionError(f"stored({name!r}) in the recipe of a parameter")

    def buffer(self, name: str) -> np.ndarray:
        raise AssertionError(f"buffer({name!r}) in the recipe of a parameter")


def stream_parameters(model: nn.Module, checkpoint: Checkpoint, stored: Mapping[str, Recipe]) -> None:
    """Makes every module with parameters on "meta" read them from the checkpoint, by the recipes `stored`."""
    for path, module in model.named_modules():
        own = {leaf: stored[f"{path}.{leaf}" if path else leaf] for leaf in _unread(module)}
        if not own:
            continue
        _give_back_when_freed()
        base = next((cls for kind, cls in _STREAMED.items() if isinstance(module, kind)), None)
        if base is not None and list(own) == ["weight"]:
            # Behind the module's own class: a subclass that scales or shifts calls the streamed forward with super().
            kind = type(module)
            module.__class__ = type(kind.__name__, (base,) if kind in _STREAMED else (kind, base), {})
            module._llmc_read = _Rows(checkpoint, own["weight"])
        else:
            module.register_forward_pre_hook(_Loader(checkpoint, own))
            module.register_forward_hook(_drop(tuple(own)), always_call=True)


@cache
def _give_back_when_freed() -> None:
    """Blocks of a megabyte and more are the system's again when they are freed. The allocator would keep them
    (mallopt(3): its threshold grows to 32 MB), with ever more holes between them: 0.8 GB when 8 GB were calibrated.
    """
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def weight_of(module: nn.Module) -> torch.Tensor:
    """f32[N, K]: the whole weight of a linear module, streamed or not."""
    rows = getattr(module, "_llmc_read", None)
    if rows is not None:
        return rows(None, None)
    loader = next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Loader)), None)
    return module.get_parameter("weight") if loader is None else loader.read("weight")


def parameter_part(module: nn.Module, name: str, index: int) -> torch.Tensor:
    """Entry `index` of the first axis of a module's parameter, streamed or not."""
    value = module.get_parameter(name)
    if not value.is_meta:
        return value[index]
    loader = next(hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Loader))
    return loader.read(name, index, index + 1)[0]


@contextlib.contextmanager
def read_in_parts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, parameters of these modules are not read before their forward: it reads parts of them itself."""
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    loaders = [hook for hook in hooks if isinstance(hook, _Loader)]
    for loader in loaders:
        loader.waits = True
    try:
        yield
    finally:
        for loader in loaders:
            loader.waits = False


def weight_blocks(module: nn.Module, elements: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Runs of rows of a linear module's weight, of at most that many elements, and where they stand; a streamed one is
    read run by run.
    """
    size, columns = module.get_parameter("weight").shape
    read: _Rows | None = getattr(module, "_llmc_read", None)
    weight = weight_of(module) if read is None else None
    step = max(elements // columns, 1)
    for start in range(0, size, step):
        stop = min(start + step, size)
        if read is not None:
            yield slice(start, stop), read(start, stop)
        elif weight is not None:
            yield slice(start, stop), weight[start:stop]


def _unread(module: nn.Module) -> list[str]:
    return [leaf for leaf, p in module._parameters.items() if p is not None and p.is_meta]


class _Rows:
    """Reads rows of one parameter."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe) -> None:
        self.checkpoint, self.recipe = checkpoint, recipe

    def __call__(self, start: int | None, stop: int | None) -> torch.Tensor:
        return read_float32(self.checkpoint, self.recipe, start, stop)


class _Loader:
    """A hook that reads parameters before a forward, unless it `waits` to be asked for parts."""

    def __init__(self, checkpoint: Checkpoint, recipes: Mapping[str, Recipe]) -> None:
        self.checkpoint, self.recipes, self.waits = checkpoint, recipes, False

    def read(self, leaf: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        return read_float32(self.checkpoint, self.recipes[leaf], start, stop)

    def __call__(self, module: nn.Module, _: Any) -> None:
        for leaf in () if self.waits else self.recipes:
            module._parameters[leaf] = nn.Parameter(self.read(leaf), requires_grad=False)


def _drop(leaves: tuple[str, ...]) -> Any:
    def drop(module: nn.Module, *_: Any) -> None:
        for leaf in leaves:
            value = module._parameters[leaf]
            if value is not None:
                module._parameters[leaf] = nn.Parameter(value.to("meta"), requires_grad=False)

    return drop


class _StreamedEmbedding(nn.Embedding):
    """Looks rows up in the checkpoint, each once."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        read: Any = self._llmc_read
        wanted, places = torch.unique(ids, return_inverse=True)
        rows = [read(row, row + 1) for row in wanted.tolist()]
        return torch.cat(rows)[places]


class StreamedLinear(nn.Linear):
    """Multiplies by blocks of rows; nothing of the weight is kept for the backward pass, which reads it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Linear's."""
        y: torch.Tensor = _Multiply.apply(x, self._llmc_read, self.out_features)
        return y if self.bias is None else y + self.bias


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, read: _Rows, outputs: int) -> torch.Tensor:
        ctx.read, ctx.inputs = read, x.shape[-1]
        y = x.new_empty((*x.shape[:-1], outputs))
        for start, stop in _blocks(outputs, x.shape[-1]):
            y[..., start:stop] = x @ read(start, stop).T
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        outputs = gradient.shape[-1]
        x = gradient.new_zeros((*gradient.shape[:-1], ctx.inputs))
        for start, stop in _blocks(outputs, ctx.inputs):
            x += gradient[..., start:stop] @ ctx.read(start, stop)
        return x, None, None


def _blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(BLOCK // (4 * columns), 1)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


_STREAMED: dict[type[nn.Module], type[nn.Module]] = {nn.Embedding: _StreamedEmbedding, nn.Linear: StreamedLinear}
