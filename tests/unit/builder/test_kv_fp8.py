"""The FP8 cache from calibration to engine: what is measured is what is written, each head has its own scales, and
engines compute what the interpreter computes.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.artifacts.types import KVScales
from llmc.builder import pipeline
from llmc.builder.cpu.lower import kv_table
from llmc.builder.interpreter import Batch, run, run_ranks
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.builder.trace import trace_model
from llmc.calibration.kv_cache import measure
from tests.models import VOCAB, tiny_config, tiny_model
from tests.unit.builder.native_engine import Engines, compile_all, lower_for_test
from tests.unit.builder.weights_of import Tensors, model_tensors, params_of

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)

#: Family and ranks: three KV heads over two ranks; a window; keys that are normed.
CASES = [("llama", 1), ("llama", 2), ("mistral", 1), ("qwen3", 2)]
CAPACITIES = (60, 40)
STEPS = ((30, 1), (1, 20), (1, 1), (1, 7))
KEYS, VALUES = (0.02, 0.7, 0.11), (0.05, 0.009, 0.3)


@cache
def model(family: str) -> tuple[Any, Tensors]:
    traced = trace_model(tiny_config(family))
    return traced.graph, model_tensors(tiny_model(family), traced.buffers)


def compiled(family: str, tp: int, keys: tuple[float, ...] = KEYS, values: tuple[float, ...] = VALUES) -> Compiled:
    graph = model(family)[0]
    attention = [node.attrs for node in graph if node.op == "attention"]
    scales: dict[int, KVScales] = {a.layer: (keys[: a.kv_heads], values[: a.kv_heads]) for a in attention}
    return pipeline.run(graph, CompileOptions(kv_dtype="f8e4m3", kv_scales=scales, tp=tp))


def tokens_of(steps: Any) -> list[list[list[int]]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(0, VOCAB, n).tolist() for n in counts] for counts in steps]


def interpreted(built: Compiled, tensors: Tensors, kv_dtype: str = "f8e4m3") -> np.ndarray:
    """The logits of all steps."""
    batches = [Batch(graph, CAPACITIES, block_size=16, kv_dtype=kv_dtype) for graph in built.graphs]
    made = []
    for tokens in tokens_of(STEPS):
        prepared = [batch.step(tokens) for batch in batches]
        shards = [
            out[0] for out in run_ranks(built.graphs, prepared[0][0], [c for _, c in prepared], params_of(tensors))
        ]
        made.append(shards[0] if shards[0].shape[1] == VOCAB else np.concatenate(shards, axis=1))
    return np.concatenate(made)


def apart(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((have - want) ** 2) / np.mean(want**2)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_engines_compute_what_the_interpreter_computes(case: tuple[str, int]) -> None:
    """A key whose last bit differs may round to the neighbouring E4M3 number: hence the tolerance. With the scales of
    other heads, or none, the interpreter is far outside it.
    """
    built, tensors = compiled(*case), model(case[0])[1]
    lowered = lower_for_test(built)
    engines = Engines(lowered, compile_all([lowered])[0], tensors, sum(-(-n // 16) for n in CAPACITIES))
    running = Batch(built.graphs[0], CAPACITIES, block_size=16)
    have = np.concatenate([engines.run(*running.step(tokens)) for tokens in tokens_of(STEPS)])
    engines.close()
    want = interpreted(built, tensors)
    assert apart(have, want) < 5e-3
    exact = interpreted(built, tensors, "f32")
    assert 5e-3 < apart(want, exact) < 0.3  # E4M3 has four significant bits
    heads = next(node.attrs.kv_heads for node in model(case[0])[0] if node.op == "attention")
    for keys, values in ((KEYS[:heads][::-1], VALUES), (KEYS, VALUES[:heads][::-1])):
        wrong = with_readers_of(built, compiled(*case, keys, values))
        assert apart(have, interpreted(wrong, tensors)) > 0.05


def with_readers_of(built: Compiled, other: Compiled) -> Compiled:
    """What writes the cache is one's, what reads it the other's."""
    graphs = tuple(
        graph.with_nodes(
            theirs if own.op == "paged_attention" else own for own, theirs in zip(graph, also, strict=True)
        )
        for graph, also in zip(built.graphs, other.graphs, strict=True)
    )
    return dataclasses.replace(built, graphs=graphs)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "mistral"])
def test_what_is_calibrated_is_what_is_written(family: str) -> None:
    """Hugging Face's keys and values by layer and head, against the cache of the compiled graph."""
    graph, tensors = model(family)
    ids = np.random.default_rng(1).integers(6, VOCAB, 40).tolist()
    found = measure(tiny_model(family), [ids[:25], ids])
    built = pipeline.run(graph, CompileOptions()).graphs[0]
    batch = Batch(built, (40,))
    step, context = batch.step([ids])
    run(built, step, context, params_of(tensors))
    assert found.keys() == context.kv.keys()
    for layer, ranges in found.items():
        for have, written in zip(ranges, (context.kv[layer].keys, context.kv[layer].values), strict=True):
            np.testing.assert_allclose(have.numpy(), np.abs(written).max((0, 1, 3)), rtol=1e-4)


def test_ranks_have_the_scales_of_their_heads() -> None:
    first, second = compiled("llama", 2).graphs
    for graph, part in ((first, slice(0, 2)), (second, slice(2, 3))):
        found = [node.attrs.kv_scales for node in graph if node.op in ("rope_cache", "paged_attention")]
        assert np.array(found) == pytest.approx(np.array([(KEYS[part], VALUES[part])] * 4))


def test_a_token_takes_half_of_bf16() -> None:
    graph = compiled("llama", 1).graphs[0]
    assert kv_table(graph, 16, "f8e4m3")[1] * 2 == kv_table(graph, 16, "bf16")[1]


def test_layers_and_heads_without_scales_are_named() -> None:
    graph = model("llama")[0]
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn.*none for the keys and values of layer 1.*bf16"):
        pipeline.run(graph, CompileOptions(kv_dtype="f8e4m3", kv_scales={0: ((1.0,), (1.0,))}))
    with pytest.raises(UnsupportedError, match="layer 0 has 3 KV heads, and there are scales for the keys of 2"):
        pipeline.run(graph, CompileOptions(kv_dtype="f8e4m3", kv_scales={0: ((1.0, 2.0), (1.0,))}))
    with pytest.raises(UsageError, match="needs scales"):
        pipeline.run(graph, CompileOptions(kv_dtype="f8e4m3"))


def test_latent_attention_is_refused() -> None:
    graph = trace_model(tiny_config("deepseek_v3")).graph
    built = pipeline.run(graph, CompileOptions(kv_dtype="f8e4m3", kv_scales={}))
    with pytest.raises(UnsupportedError, match=r"latent attention is f32 or bf16.*--kv-cache-dtype bf16"):
        lower_for_test(built)
