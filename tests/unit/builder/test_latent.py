"""Latent attention through the compiler: what is absorbed, what is not and why, how much the cache takes, tp."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.builder import pipeline
from llmc.builder.cpu.lower import lower
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.memory import MemoryPlan, memory_plan
from llmc.builder.operators import attrs_of
from llmc.builder.passes.absorb_latent import absorb_latent
from llmc.builder.passes.rewrite import tidy
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.builder.trace import trace_model
from llmc.builder.weights.cut import sliced
from llmc.builder.weights.evaluation import evaluate, infer
from llmc.builder.weights.random import RandomWeights
from llmc.builder.weights.recipe import Matrices, parse
from llmc.profiles import load_profile, load_target
from tests.golden.goldens import FOLDER


@functools.cache
def deepseek_v3(tp: int) -> tuple[Compiled, MemoryPlan]:
    """DeepSeek-V3's own config (transformers' defaults), of whose 61 layers two dense ones are kept."""
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2)
    compiled = pipeline.run(trace_model(config).graph, CompileOptions(precision="bf16", tp=tp))
    target = load_target("cpu")
    profile = load_profile("chat", config.max_position_embeddings, target)
    lowered = lower(compiled.graphs, profile, target, compiled.kv_dtype, compiled.vocab)
    return compiled, memory_plan(lowered, "deepseek_v3", "bf16")


@pytest.mark.parametrize("tp", [1, 3])
def test_deepseek_v3_caches_its_latent(tp: int) -> None:
    """512 + 64 columns in bf16 are 1152 bytes a token and layer, on every rank; 128 expanded heads would be 81920."""
    compiled, memory = deepseek_v3(tp)
    assert [rank.kv_bytes_per_token for rank in memory.ranks] == [2 * (512 + 64) * 2] * tp
    heads = [n.attrs.heads for graph in compiled.graphs for n in graph if n.op == "latent_attention"]
    assert heads == {1: [128, 128], 3: [43, 43, 43, 43, 42, 42]}[tp]


def test_twelve_launches_a_layer() -> None:
    """Two norms, the joined down projections, the query's norm and up projection, two products by head, cache and
    attention, output, gate with up, down.
    """
    compiled, _ = deepseek_v3(1)
    assert [launches.per_layer for launches in compiled.launches] == [12.0]


def golden(**changes: str) -> Graph:
    text = (FOLDER / "absorb_latent.before.ir").read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    return parse_graph(text, attrs_of)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("window=None", "window=8", "its scores have window"),
        ("softcap=None", "softcap=3.0", "its scores have softcap"),
        ("%w: f32[26,6] = param() {recipe=\"load('layers.0.attn.kv_b.weight')\"}", "%w: f32[26,6] = input() {name='w'}",
         "computed at run time"),
    ],
)  # fmt: skip
def test_what_is_not_absorbed_is_said_with_its_reason(old: str, new: str, reason: str) -> None:
    graph = golden(change=(old, new))
    after, report = absorb_latent(graph)
    assert after == tidy(graph)
    (note,) = report.notes
    assert note.startswith("attention @layers.0.attn: the cache holds heads expanded from their latent")
    assert reason in note
    assert (report.matched, report.expected) == (0, 1)


def test_keys_without_a_shared_part_are_no_latent_attention() -> None:
    """Plain attention makes keys and values from one input too."""
    key = "concat(%keys, %shared) {axis=2}"
    graph = golden(change=(key, "concat(%keys, %turned) {axis=2}"))
    after, report = absorb_latent(graph)
    assert (after, report.matched, report.expected) == (tidy(graph), 0, 0)


def test_a_layer_with_a_window_keeps_its_heads_and_is_named_beside_one_that_is_absorbed() -> None:
    first = golden()
    names = {out: f"{out}.b" for node in first for out in node.outputs if node.op != "input"}

    def second(node: Any) -> Any:
        attrs = node.attrs
        if node.op == "attention":
            attrs = type(attrs)(**{**vars(attrs), "window": 8, "layer": 1})
        inputs = tuple(names.get(name, name) for name in node.inputs)
        outputs = tuple(names[name] for name in node.outputs)
        return node.replace(inputs=inputs, outputs=outputs, attrs=attrs, path=node.path.replace("layers.0", "layers.1"))

    more = [second(node) for node in first if node.op != "input"]
    graph = first.with_nodes([*first.nodes, *more], (*first.outputs, names[first.outputs[0]]))
    after, report = absorb_latent(graph)
    assert [node.attrs.layer for node in after if node.op == "latent_attention"] == [0]
    assert [node.attrs.layer for node in after if node.op == "attention"] == [1]
    (note,) = report.notes
    assert note.startswith("attention @layers.1.attn")


def test_more_ranks_than_heads_are_refused_with_both_numbers() -> None:
    text = (FOLDER / "merge_latent.before.ir").read_text()
    with pytest.raises(UnsupportedError, match="tp 3 is larger than the 2 query heads of layer 0"):
        pipeline.shard(parse_graph(text, attrs_of), 3)


def test_matrices_are_cut_by_head() -> None:
    """A rank's heads of a stack are its rows of the checkpoint's matrix."""
    recipe = parse("swap(matrices(runs(load('w'), 2, 4, 3, 5), 3), 1, 2)")
    weights = RandomWeights([parse_graph(_PARAM, attrs_of)])
    whole = evaluate(recipe, weights)
    assert infer(recipe, weights.shape) == TensorType("f32", (4, 6, 3))
    np.testing.assert_array_equal(evaluate(sliced(recipe, 0, 1, 3), weights), whole[1:3])
    rows = evaluate(parse("load('w')"), weights)
    np.testing.assert_array_equal(whole[2], rows[12:15].T)
    assert str(sliced(recipe, 0, 1, 3)) == "swap(matrices(runs(load('w'), 7, 2, 3, 5), 3), 1, 2)"
    with pytest.raises(ValueError, match="no stack of things of 4 rows"):
        infer(Matrices(parse("load('w')"), 4), weights.shape)


_PARAM = """graph g rank=0 tp=1 {
  %w: f32[22,6] = param() {recipe="load('w')"}
  return %w
}
"""
