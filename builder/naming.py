"""From a checkpoint's tensors to the model's parameters, as recipes: published checkpoints keep older names and forms.

Comes in: a transformers model without weights, names and shapes of the stored tensors. Goes out: parameter name ->
recipe. Must not know: any model family: the renamings and conversions are transformers' own tables, run as they are.

transformers converts while it loads: it renames, stacks the matrices of experts, splits and joins projections. Here its
conversions run on tensors that have a recipe instead of values (`_Symbolic`), so that what they do to a tensor becomes
an expression that is executed later, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.weights.evaluation import infer
from llmc.builder.weights.recipe import Concat, Load, Recipe, RecipeError, Reshape, Slice, Stack, Swap


def parameter_recipes(model: Any, tensors: Mapping[str, Sequence[int]]) -> dict[str, Recipe]:
    """Recipe of every parameter and stored buffer of `model` that the tensors (name -> shape) give, by its own name.

    Raises UnsupportedError for a conversion that cannot be a recipe, CheckpointError where one fails.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, wanted = model.base_model_prefix, model.state_dict()
    recipes: dict[str, Recipe] = {}
    conversions: dict[str, Any] = {}
    for stored in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, wanted)
        if name not in wanted and stored in wanted:  # it has its present name already
            name, pattern = rename_source_key(stored, [], [], prefix, wanted)
        if name not in wanted:
            continue
        if pattern is None:
            recipes.setdefault(name, Load(stored))
        else:
            conversion = conversions.setdefault(name, deepcopy(by_pattern[pattern]))
            conversion.add_tensor(name, stored, pattern, _Symbolic.of(Load(stored), tensors[stored]))
    for name, conversion in conversions.items():
        recipes |= _converted(model, name, conversion)
    return recipes


def _converted(model: Any, name: str, conversion: Any) -> dict[str, Recipe]:
    """What a conversion makes of the tensors that it has collected."""
    stored = [str(t.recipe) for group in conversion.collected_tensors.values() for t in group]
    try:
        results = conversion.convert(name, model=model, config=model.config)
        found = {key: value[0] if isinstance(value, list) else value for key, value in results.items()}
    except UnsupportedError as error:
        raise UnsupportedError(f"parameter {name}: {error}") from error
    except Exception as error:  # third-party code, on shapes that may not fit
        raise CheckpointError(
            f"the checkpoint's tensors for parameter {name} ({', '.join(stored[:3])}, ...) cannot be converted as "
            f"transformers does: {' '.join(str(error).split())}; is one of them missing?"
        ) from error
    return {key: value.recipe for key, value in found.items() if isinstance(value, _Symbolic)}


class _Symbolic(torch.Tensor):
    """A tensor on the meta device that knows the recipe of its values; views and joins give another such tensor."""

    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe, shape: Sequence[int]) -> _Symbolic:
        """A tensor of that shape."""
        value = torch.Tensor._make_wrapper_subclass(_Symbolic, tuple(shape), dtype=torch.float32, device="meta")
        assert isinstance(value, _Symbolic)
        value.recipe = recipe
        return value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs shape-only operators on the recipe. The result's shape is what PyTorch finds on the meta device."""
        name = func._schema.name.partition("::")[2]
        if name not in _RULES:
            raise UnsupportedError(f"converting its stored tensors takes operator {name}, which no recipe has")
        shapes = func(*_plain(args), **{k: _plain(v) for k, v in (kwargs or {}).items()})
        recipes = _RULES[name](shapes, *args, **(kwargs or {}))
        if isinstance(recipes, Recipe):
            return cls.of(recipes, shapes.shape)
        return [cls.of(recipe, piece.shape) for recipe, piece in zip(recipes, shapes, strict=True)]


def _plain(value: Any) -> Any:
    """The same arguments with empty tensors on the meta device."""
    if isinstance(value, _Symbolic):
        return torch.empty(value.shape, device="meta")
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _same(out: Any, x: _Symbolic, *args: Any, **kwargs: Any) -> Recipe:
    return x.recipe


def _reshape(out: Any, x: _Symbolic, *args: Any, **kwargs: Any) -> Recipe:
    return x.recipe if out.shape == x.shape else Reshape(x.recipe, tuple(out.shape))


def _cat(out: Any, tensors: Sequence[_Symbolic], dim: int = 0) -> Recipe:
    return Concat(dim % out.dim(), tuple(t.recipe for t in tensors)) if len(tensors) > 1 else tensors[0].recipe


def _stack(out: Any, tensors: Sequence[_Symbolic], dim: int = 0) -> Recipe:
    """Recipes stack on the first axis, which then moves to its place one exchange at a time."""
    recipe: Recipe = Stack(tuple(t.recipe for t in tensors))
    for axis in range(dim % out.dim()):
        recipe = Swap(recipe, axis, axis + 1)
    return recipe


def _transpose(out: Any, x: _Symbolic, dim0: int = 0, dim1: int = 1) -> Recipe:
    return Swap(x.recipe, dim0 % x.dim(), dim1 % x.dim())


def _permute(out: Any, x: _Symbolic, dims: Sequence[int]) -> Recipe:
    recipe, order = x.recipe, list(range(x.dim()))
    for axis, dim in enumerate(d % x.dim() for d in dims):
        if order[axis] != dim:
            other = order.index(dim)
            recipe = Swap(recipe, axis, other)
            order[axis], order[other] = order[other], order[axis]
    return recipe


def _slice(out: Any, x: _Symbolic, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Recipe:
    low, high, step = slice(start, end, step).indices(x.shape[dim])
    if step != 1:
        raise UnsupportedError(f"converting its stored tensors takes every {step}th entry, which no recipe has")
    return x.recipe if (low, high) == (0, x.shape[dim]) else Slice(x.recipe, dim % x.dim(), low, high)


def _select(out: Any, x: _Symbolic, dim: int, index: int) -> Recipe:
    place = index % x.shape[dim]
    return Reshape(Slice(x.recipe, dim % x.dim(), place, place + 1), tuple(out.shape))


def _split(out: Any, x: _Symbolic, sizes: Any, dim: int = 0) -> list[Recipe]:
    pieces: list[Recipe] = []
    start = 0
    for piece in out:
        stop = start + piece.shape[dim]
        pieces.append(Slice(x.recipe, dim % x.dim(), start, stop))
        start = stop
    return pieces


#: Operator -> the recipe (recipes, where it has several results) of (result on the meta device, arguments).
_RULES: dict[str, Callable[..., Recipe | list[Recipe]]] = {
    **dict.fromkeys(("clone", "detach", "alias", "_to_copy"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"), _reshape),
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("transpose", "t"), _transpose),
    "permute": _permute,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
}


def shape_of(recipe: Recipe, tensors: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape of a recipe's value. Raises CheckpointError where its tensors do not fit each other."""
    try:
        return tuple(int(d) for d in infer(recipe, lambda leaf: tuple(tensors[leaf.name])).shape)
    except RecipeError as error:
        raise CheckpointError(f"the checkpoint's tensors do not fit each other: {error}") from error
