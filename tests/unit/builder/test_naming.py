"""Stored tensors become parameters as transformers makes them: renamed, stacked, split, joined; as recipes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.builder import naming
from llmc.builder.naming import parameter_recipes, shape_of
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.placement import Member, Placement
from llmc.builder.weights.recipe import Load, Recipe, Stack, leaves, parse
from llmc.builder.weights.stream import write_weights
from llmc.tiny_model import tiny_model
from tests.unit.builder.weights_of import Tensors


def published(model: PreTrainedModel, folder: Path) -> dict[str, np.ndarray]:
    """The tensors as transformers publishes them: it reverses on saving what it converts on loading."""
    model.save_pretrained(folder)
    return {name: value.numpy() for name, value in load_file(folder / "model.safetensors").items()}


def shapes(tensors: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in tensors.items()}


#: Families whose published tensors differ from the model's parameters, and a stored name that shows how.
CONVERTED = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",  # stacked, and joined to gate_up
    "qwen2_moe": "model.layers.0.mlp.experts.7.gate_proj.weight",
    "granitemoe": "model.layers.0.block_sparse_moe.input_linear.weight",  # renamed
    "jamba": "model.layers.1.feed_forward.experts.0.down_proj.weight",
}


@pytest.mark.parametrize("family", [*CONVERTED, "gpt2", "gpt_neox"])
def test_recipes_give_the_parameters_that_were_saved(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    stored = published(model, tmp_path)
    if family in CONVERTED:
        assert CONVERTED[family] in stored
    recipes = parameter_recipes(model, shapes(stored))
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    tied = set(state) - set(recipes)
    assert tied <= {"lm_head.weight"}
    source = Tensors(stored, {})
    for name, recipe in recipes.items():
        assert parse(str(recipe)) == recipe
        assert shape_of(recipe, shapes(stored)) == state[name].shape
        np.testing.assert_array_equal(evaluate(recipe, source), state[name], err_msg=name)
    read = {leaf.name for recipe in recipes.values() for leaf in leaves(recipe)}
    assert read == set(stored)


def test_a_tensor_in_its_present_form_stays_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    present = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert parameter_recipes(model, present) == {name: Load(name) for name in present}


def test_names_of_the_bare_model_are_found() -> None:
    model = tiny_model("gpt2")
    bare = {name: tuple(value.shape) for name, value in model.transformer.state_dict().items()}
    assert parameter_recipes(model, bare)["transformer.wte.weight"] == Load("wte.weight")


def test_a_missing_expert_is_an_error_that_names_the_parameter(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    stored = shapes(published(model, tmp_path))
    del stored["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    with pytest.raises(CheckpointError, match=r"parameter model\.layers\.1\.mlp\.experts\.gate_up_proj .*missing"):
        parameter_recipes(model, stored)


def test_a_conversion_that_computes_is_refused_by_its_operator() -> None:
    tensor = naming._Symbolic.of(Load("a"), (4, 6))
    with pytest.raises(UnsupportedError, match="operator mul"):
        _ = tensor * 2


X, Y = np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(24, 48, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: torch.stack([x, y], 0),
        lambda x, y: torch.stack([x, y], 2),
        lambda x, y: torch.cat([x, y], -1),
        lambda x, y: x.chunk(3, -1)[1],
        lambda x, y: x.split([1, 3])[1],
        lambda x, y: torch.stack([x, y]).permute(2, 0, 1),
        lambda x, y: x.view(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),  # as for rotary pairs
        lambda x, y: torch.stack([x, y])[1],
        lambda x, y: x.t()[2:5].unsqueeze(0),
    ],
)
def test_symbolic_tensors_follow_torch(operation) -> None:  # type: ignore[no-untyped-def]
    recipe = operation(naming._Symbolic.of(Load("x"), X.shape), naming._Symbolic.of(Load("y"), Y.shape)).recipe
    want = operation(torch.from_numpy(X), torch.from_numpy(Y)).numpy()
    source = Tensors({"x": X, "y": Y}, {})
    np.testing.assert_array_equal(evaluate(recipe, source), want)
    assert written(recipe, source, want) == want.tobytes()


def test_experts_stream_one_after_another() -> None:
    tensors = {f"e{n}": np.full((64, 8), n, np.float32) for n in range(8)}
    source = Reads(tensors, {})
    recipe = Stack(tuple(Load(name) for name in tensors))
    want = np.stack(list(tensors.values()))
    assert written(recipe, source, want) == want.tobytes()
    assert max(source.sizes) == 64 * 8  # never more than a matrix at once


class Reads(Tensors):
    """Counts the elements of each read."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.sizes: list[int] = []

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        value = super().read(name, start, stop)
        self.sizes.append(value.size)
        return value


def written(recipe: Recipe, source: Tensors, want: np.ndarray) -> bytes:
    """The bytes that streaming writes, in the smallest blocks."""
    placement = Placement(str(recipe), TensorType("f32", want.shape), 0, "")
    sink = bytearray()

    class Sink:
        def write(self, data: bytes | memoryview) -> None:
            sink.extend(data)

    write_weights(Member((placement,), want.nbytes), source, Sink(), block=1)
    return bytes(sink)
