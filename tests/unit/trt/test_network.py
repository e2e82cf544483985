"""The network that is emitted for TensorRT, computed layer by layer in numpy, beside the graph's interpreter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.builder import pipeline
from llmc.builder.interpreter import Batch, Exchange, run, run_ranks
from llmc.builder.pipeline import CompileOptions
from llmc.builder.trace import trace_model
from llmc.builder.trt.emitter import Emitter
from llmc.builder.trt.engine import build_engine
from llmc.builder.trt.linear_cache import LinearCache
from llmc.builder.trt.paged_cache import PagedCache
from llmc.builder.trt.plugins import AotPlugins
from llmc.plugins.pointwise import evaluate
from tests.models import VOCAB, tiny_config, tiny_model
from tests.unit.builder.weights_of import Tensors, model_tensors, params_of
from tests.unit.trt.numpy_plugins import Plugins
from tests.unit.trt.numpy_tensorrt import DataType, NumpyTensorRT, Tensor
from tests.unit.trt.steps import LinearCaches, Pools

torch.set_num_threads(1)
PROFILE = ShapeProfile("test", (TokenRange(1, 1, 4), TokenRange(5, 16, 16)), 4, 32, 16)
#: Tokens of each sequence in each step: chunks that go on, sequences that join and sit out, and decode steps.
STEPS = ((9, 1, 0), (1, 1, 5), (4, 0, 1), (1, 1, 1))
DECODE, MIXED = 0, 1
#: Of keys and of values, by KV head.
SCALES = ((0.5, 0.25, 1.0), (0.25, 0.5, 0.125))


@cache
def model(family: str) -> tuple[Any, Tensors]:
    traced = trace_model(tiny_config(family))
    return traced.graph, model_tensors(tiny_model(family), traced.buffers)


@pytest.mark.parametrize(
    ("family", "options", "scale", "bound"),  # of bf16 products, beside which an input may round to the next E4M3
    [
        ("llama", CompileOptions("fp32", kv_dtype="bf16"), None, 6e-3),
        ("qwen3", CompileOptions("fp32", kv_dtype="bf16"), None, 6e-3),
        ("gpt2", CompileOptions("fp32", kv_dtype="bf16"), None, 6e-3),
        ("mistral", CompileOptions("fp32", kv_dtype="bf16"), None, 6e-3),
        ("llama", CompileOptions("bf16"), None, 2e-2),
        ("llama", CompileOptions("fp8", fp8_activations="none"), None, 2e-2),
        ("llama", CompileOptions("fp8"), 0.01, 8e-2),
    ],
)  # fmt: skip
def test_the_network_computes_what_the_interpreter_computes(
    family: str, options: CompileOptions, scale: float | None, bound: float
) -> None:
    traced, tensors = model(family)
    graph, params = pipeline.run(traced, options).graphs[0], params_of(tensors)
    if scale is not None:
        nodes = (
            replace(n, attrs=replace(n.attrs, x_per_token=False, x_scale=scale)) if "x_per_token=True" in str(n) else n
            for n in graph
        )
        graph = graph.with_nodes(nodes)
    batch = Batch(graph, (16, 8, 8), block_size=4, kv_dtype="bf16")
    caches = LinearCaches(graph, 3, PROFILE.max_seq_len)
    rng = np.random.default_rng(0)
    for counts in STEPS:
        tokens = [rng.integers(0, VOCAB, n).tolist() for n in counts]
        active = [s for s, count in enumerate(counts) if count]
        inputs, context = batch.step(tokens)
        trt = NumpyTensorRT(caches.feeds(inputs, context, active))
        build_engine(trt, graph, params, LinearCache(graph, PROFILE.max_seq_len), PROFILE, 89)
        (want,) = run(graph, inputs, context, params)
        have = trt.network.outputs.pop("logits")
        caches.write(trt.network.outputs, active)
        assert np.sqrt(np.mean((have - want) ** 2)) <= bound * np.sqrt(np.mean(want**2))
        decodes = max(counts) == 1
        assert [p.admits(trt.network.inputs) for p in trt.profiles] == [decodes, True]


@pytest.mark.parametrize(
    ("family", "options", "bound"),
    [
        ("llama", CompileOptions("fp32", kv_dtype="bf16"), 6e-3),
        ("mistral", CompileOptions("fp32", kv_dtype="bf16"), 6e-3),
        ("llama", CompileOptions("fp32", kv_dtype="f8e4m3", kv_scales=dict.fromkeys(range(2), SCALES)), 3e-2),
    ],
)
def test_plugins_read_and_write_the_blocks(family: str, options: CompileOptions, bound: float) -> None:
    """Their kernels run in Triton's interpreter, with the grid and arguments that the plug-ins name."""
    traced, tensors = model(family)
    made = pipeline.run(traced, options)
    graph, params, plugins = made.graphs[0], params_of(tensors), Plugins()
    batch = Batch(graph, (32, 8, 8), block_size=PROFILE.block_size, kv_dtype=made.kv_dtype)
    pools: Pools | None = None
    rng = np.random.default_rng(0)
    for counts in STEPS[1:]:
        inputs, context = batch.step([rng.integers(0, VOCAB, n).tolist() for n in counts])
        pools = pools or Pools(graph, context, made.kv_dtype, 2)
        trt = NumpyTensorRT(pools.feeds(inputs, context), plugins=plugins)
        cache = PagedCache(AotPlugins(plugins, trt.DataType.FLOAT, plugins.compile), graph, PROFILE, made.kv_dtype, 90)
        engine = build_engine(trt, graph, params, cache, PROFILE, 90)
        (want,) = run(graph, inputs, context, params)
        have = trt.network.outputs.pop("logits")
        pools.write(trt.network.outputs)
        assert np.sqrt(np.mean((have - want) ** 2)) <= bound * np.sqrt(np.mean(want**2))
        assert trt.profiles[1].admits(trt.network.inputs)
        assert trt.previews == ["aliased"]
        assert list(engine.layers.values()).count("PLUGIN_V3") == sum(n.op in cache.layers for n in graph)
    assert len(plugins.compiled) <= 4  # layers that are alike share their plug-ins, whatever the step


def test_ranks_meet_in_their_sums() -> None:
    traced, tensors = model("llama")
    graphs, params = pipeline.run(traced, CompileOptions("fp32", tp=2, kv_dtype="bf16")).graphs, params_of(tensors)
    batches = [Batch(graph, (8, 4), block_size=4, kv_dtype="bf16") for graph in graphs]
    steps = [batch.step([[5, 6, 7], [8]]) for batch in batches]
    want = run_ranks(graphs, steps[0][0], [context for _, context in steps], params)
    exchange = Exchange(2, 60)

    def rank(number: int) -> np.ndarray:
        graph, (inputs, context) = graphs[number], steps[number]
        caches = LinearCaches(graph, 2, PROFILE.max_seq_len)
        trt = NumpyTensorRT(caches.feeds(inputs, context, [0, 1]), partial(exchange.all_reduce, number))
        engine = build_engine(trt, graph, params, LinearCache(graph, PROFILE.max_seq_len), PROFILE, 89)
        assert list(engine.layers.values()).count("DIST_COLLECTIVE") == sum("all_reduce=True" in str(n) for n in graph)
        return trt.network.outputs["logits"]

    with ThreadPoolExecutor(2) as pool:
        for have, (expected,) in zip(pool.map(rank, range(2)), want, strict=True):
            assert np.sqrt(np.mean((have - expected) ** 2)) <= 6e-3 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("name", ["rsqrt", "silu", "square", "log1p", "expm1"])
def test_functions_that_have_no_layer_are_made_of_others(name: str) -> None:
    x = np.random.default_rng(0).uniform(0.1, 3, (2, 4, 5)).astype(np.float32)
    trt = NumpyTensorRT({})
    e = Emitter(trt, trt.network, {})
    have = e.formula(f"{name}(i0)", [Tensor(x, DataType.FLOAT)], 3)
    np.testing.assert_allclose(have.array, evaluate(f"{name}(i0)", [x]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the function where has no TensorRT layer"):
        e.formula("where(i0, i0, i0)", [have], 3)
