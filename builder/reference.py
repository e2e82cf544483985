"""The Hugging Face model at float32: the truth from outside that engines are held against.

Comes in: a `Checkpoint`. Goes out: the stock torch module with the checkpoint's weights, its logits and greedy tokens.
Must not know: graphs, plans, kernels.

The weights come through `Checkpoint.read`, not `from_pretrained`: the same bytes that the engine is built from, and a
GGUF loads in seconds instead of minutes. A model beyond `RESIDENT` bytes is never in memory: its large weights are read
whenever their module runs, so a pass takes as many tokens as its activations allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.machine import usable_cpus
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.naming import parameter_recipes, shape_of
from llmc.builder.weights.recipe import Load, Recipe

if TYPE_CHECKING:
    import torch

#: Bytes of all weights at float32 up to which they stay in memory.
RESIDENT = 1 << 30
#: Elements up to which a weight stays in memory in any case: norms, biases, small convolutions.
_SMALL = 1 << 18
#: Bytes that the activations of one pass may take, roughly.
_PASS = 256 << 20


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


def load_reference(checkpoint: Checkpoint, resident: int | None = None, longest: int | None = None) -> Any:
    """The torch module with the checkpoint's weights as float32; raises CheckpointError for what does not fit.

    With `longest`, rotary frequencies that depend on the length of a sequence are those of that many tokens, as in an
    engine that serves them; without, transformers chooses anew in each pass.

    Where all weights together take more than `resident` bytes (None: RESIDENT), the large ones are read as the model
    runs. From here on PyTorch takes no more threads than this process may use.
    """
    import torch
    from torch import nn

    from llmc.builder.streamed import read_float32, stream_parameters
    from llmc.builder.trace import frequencies

    # It takes one for each processor, whatever part of them a control group grants; fewer where it was told so before.
    torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    with _parameters_on_meta():
        model = build_model(checkpoint, "cpu")
    groups = list(dict.fromkeys(parameter_names(model).values()))
    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    recipes = parameter_recipes(model, shapes)
    stored = {names: _stored(checkpoint, names, recipes) for names in groups}
    sizes = {names: model.get_parameter(names[0]).numel() for names in groups}
    for names in groups:
        _check_shape(checkpoint, names, stored[names], shapes, tuple(model.get_parameter(names[0]).shape))
    streamed = 4 * sum(sizes.values()) > (RESIDENT if resident is None else resident)
    with torch.no_grad():
        for names in groups:
            if streamed and sizes[names] > _SMALL:
                continue
            value = nn.Parameter(read_float32(checkpoint, stored[names]), requires_grad=False)
            for name in names:
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._parameters[leaf] = value
        for name, buffer in model.named_buffers():
            if name in recipes:
                buffer.copy_(read_float32(checkpoint, recipes[name]))
    if longest is not None:
        frequencies.fix(model, longest)
    stream_parameters(model, checkpoint, {name: stored[names] for names in groups for name in names})
    return model.requires_grad_(False)


def _stored(checkpoint: Checkpoint, names: Sequence[str], recipes: Mapping[str, Recipe]) -> Recipe:
    """How a parameter with these names is stored."""
    found = next((recipes[name] for name in names if name in recipes), None)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.path}: has no tensor {' or '.join(map(repr, names))}, which the model of config.json needs; "
            "the config belongs to another checkpoint, or a file is missing"
        )
    return found


def _check_shape(
    checkpoint: Checkpoint,
    names: Sequence[str],
    recipe: Recipe,
    shapes: Mapping[str, Sequence[int]],
    wanted: tuple[int, ...],
) -> None:
    if (have := shape_of(recipe, shapes)) != wanted:
        name = recipe.name if isinstance(recipe, Load) else names[0]
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} has shape {list(have)}, the model of config.json needs "
            f"{list(wanted)}: the config belongs to another checkpoint"
        )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside keep their buffers, which they compute, and get parameters without memory."""
    from torch import nn

    register = nn.Module.register_parameter

    def without_memory(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is tied stays the same object
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def pass_tokens(model: Any) -> int:
    """How many tokens one pass of the model may run at once: its widest values, logits mostly, take the memory."""
    widest = max(max(p.shape) for p in model.parameters() if p.dim() > 1)
    return max(_PASS // (8 * widest), 1)


def logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """f32[T, V]: the logits behind each of the T tokens."""
    return next(batch_logits(model, [ids]))


def batch_logits(model: Any, batch: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """f32[T, V] for each of the lists of ids, in order: as many lists at once as `pass_tokens` allows, so that weights
    that are read from the checkpoint are read as seldom as that. Lists of one pass are padded behind their end, which
    causal models do not look at.
    """
    import torch

    at, most = 0, pass_tokens(model)
    while at < len(batch):
        count, longest = 1, len(batch[at])
        while at + count < len(batch) and max(longest, len(batch[at + count])) * (count + 1) <= most:
            longest = max(longest, len(batch[at + count]))
            count += 1
        rows = torch.zeros((count, longest), dtype=torch.long)
        for row, ids in zip(rows, batch[at : at + count], strict=True):
            row[: len(ids)] = torch.tensor(list(ids))
        with torch.inference_mode():
            out = model(rows, use_cache=False).logits
        for row, ids in enumerate(batch[at : at + count]):
            yield out[row, : len(ids)].float().numpy()
        del out  # before the next pass makes its own
        at += count


def forced(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """What the model would say in the place of each token of `answers`, given the prompt and the answer before it.

    One pass instead of one a token. An answer is the model's own greedy one exactly where this returns it unchanged.
    """
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return [
        values[len(prompt) - 1 : len(ids) - 1].argmax(-1).tolist()
        for values, prompt, ids in zip(batch_logits(model, texts), prompts, texts, strict=True)
    ]


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow, each the first with the highest logit; it does not stop at an end token.

    One pass a token: for machines that cannot run the engine, whose answers `forced` checks in one.
    """
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
