"""Weights that a calibration rounded: the file there and back, refused when it is not the table's, and what the passes
make of it: stored bytes in the place of rounding, kept modules in bf16, the rest merged as before.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Choice, Ranges, RoundedFile
from llmc.artifacts.errors import CheckpointError, UsageError
from llmc.builder import pipeline
from llmc.builder.checkpoint import open_checkpoint
from llmc.builder.passes.rewrite import View
from llmc.builder.passes.weight import weight_recipe
from llmc.builder.pipeline import CompileOptions
from llmc.builder.trace import trace
from llmc.builder.verify import Verifier
from llmc.builder.weights.evaluation import evaluate
from llmc.builder.weights.fp8 import quantize_fp8
from llmc.builder.weights.rounded import RoundedWeights, RoundedWriter, scale_name, weight_name
from tests.models import save_checkpoint
from tests.unit.builder.weights_of import Tensors, params_of

DATA = CalibrationData("text", "b" * 64, 1, 8, 0)
RNG = np.random.default_rng(0)
MODULES = {
    name: (quantize_fp8(RNG.standard_normal(shape), 0.01), RNG.random(shape[0]).astype(np.float32) + 0.5)
    for name, shape in {"m.b": (5, 7), "m.a": (3, 9)}.items()
}


class Both(Tensors):
    """The checkpoint's tensors, and rounded ones of the same names."""

    def __init__(self, tensors: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray]) -> None:
        super().__init__(tensors, buffers)
        self.values: dict[str, np.ndarray] = {}

    def stored(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        return self.values[name][start:stop]


def written(folder: Path) -> CalibrationTable:
    path = folder / "t.safetensors"
    with RoundedWriter(path, {name: weight.shape for name, (weight, _) in MODULES.items()}) as writer:
        for name, (weight, scale) in MODULES.items():
            writer.add(name, weight, scale)
    file = RoundedFile(path.name, hashlib.sha256(path.read_bytes()).hexdigest())
    return CalibrationTable("a" * 64, "0", "r", DATA, {}, "token", 1.0, file, folder)


def test_every_tensor_reads_back_whole_and_by_rows(tmp_path: Path) -> None:
    rounded = RoundedWeights.open(written(tmp_path))
    for name, (weight, scale) in MODULES.items():
        assert rounded.shape(weight_name(name)) == weight.shape
        assert rounded.read(weight_name(name)).tobytes() == weight.tobytes()
        assert rounded.read(weight_name(name), 1, 3).tobytes() == weight[1:3].tobytes()
        assert rounded.read(scale_name(name)).tobytes() == scale.tobytes()
    with pytest.raises(CheckpointError, match=r"no tensor 'm\.c\.weight'"):
        rounded.read("m.c.weight")


def test_others_read_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    written(tmp_path)
    tensors = load_file(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(tensors["m.a.weight"].float().numpy(), MODULES["m.a"][0].astype(np.float32))


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    table = written(tmp_path)
    raw = bytearray((tmp_path / "t.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "t.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"t\.safetensors: has SHA-256 .* the calibration table says"):
        RoundedWeights.open(table)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"t\.safetensors: no such file"):
        RoundedWeights.open(dataclasses.replace(written(tmp_path), folder=tmp_path / "elsewhere"))


@pytest.mark.parametrize(("family", "activations"), [("llama", "token"), ("gpt2", "static")])
def test_passes_take_the_tables_choices(tmp_path: Path, family: str, activations: str) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, family))
    traced = trace(checkpoint)
    plain = pipeline.run(traced.graph, CompileOptions(precision="fp8", fp8_activations="token"))
    tensors = Both({name: checkpoint.read(name) for name in checkpoint.tensors}, traced.buffers)
    view, ranges = View(traced.graph), {}
    linears = [n for n in traced.graph if n.op == "linear" and n.path != "lm_head"]
    kept = {linears[2].path, linears[-1].path}  # the first is merged with others where the family has them apart
    unrounded = linears[3].path
    for node in linears:
        recipe = weight_recipe(view, node.inputs[1])
        assert recipe is not None
        weight = evaluate(recipe, tensors)
        amax = np.abs(weight).max(1)
        ranges[node.path] = Ranges(
            4.0, tuple(amax.tolist()), Choice(node.path in kept, 0.5, 0.02, 0.03, input_kept=node.path == unrounded)
        )
        tensors.values[weight_name(node.path)] = quantize_fp8(weight, amax[:, None] / 448)
        tensors.values[scale_name(node.path)] = amax / np.float32(448)
    params = params_of(tensors)
    table = CalibrationTable(checkpoint.digest, "0", "r", DATA, ranges, activations, 1.2, RoundedFile("t", ""))
    options = CompileOptions(precision="fp8", table=table, fp8_activations=activations, tp=2, verifier=Verifier(params))
    compiled = pipeline.run(traced.graph, options)
    quantize = next(r for r in compiled.reports if r.name == "quantize")
    assert sum("kept in bf16" in note for note in quantize.notes) == len(kept)
    assert [note.partition(":")[0] for note in quantize.notes if "its input as it is" in note] == [unrounded]
    for graph in compiled.graphs:
        dtypes = [graph.types()[n.inputs[1]].dtype for n in graph if n.op == "linear"]
        assert dtypes.count("bf16") == len(kept) + 1  # and the head
        rounding = [(n.attrs.x_per_token, n.attrs.x_scale) for n in graph if n.op == "linear"]
        assert rounding.count((False, None)) == len(kept) + 1 + 1
        recipes = [n.attrs.recipe for n in graph if n.op == "param" and n.types[0].dtype == "f8e4m3"]
        assert all("stored(" in recipe and "fp8(" not in recipe for recipe in recipes)
    assert compiled.launches[0].per_layer <= plain.launches[0].per_layer + 1
