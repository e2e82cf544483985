"""ONNX models beside the interpreter: families, precisions, every elementwise function; what is refused, by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder import pipeline
from llmc.builder.interchange.emitter import Emitter
from llmc.builder.interchange.export import export_graphs
from llmc.builder.interchange.model import onnx_model
from llmc.builder.interpreter import Batch, Exchange, run, run_ranks
from llmc.builder.pipeline import CompileOptions
from llmc.builder.trace import trace_model
from llmc.builder.weights.pack import pack_panels, unpack_panels
from llmc.plugins.pointwise import evaluate
from llmc.plugins.pointwise.functions import ARITY
from llmc.tiny import tiny_config as small_config
from llmc.tiny_model import random_model
from tests.models import VOCAB, tiny_config, tiny_model
from tests.unit.builder.onnx_steps import OnnxSteps
from tests.unit.builder.weights_of import Tensors, model_tensors, params_of

torch.set_num_threads(1)
CAPACITIES = (24, 20, 12)
#: Tokens of each sequence in each step: chunks that go on, sequences that join and sit out.
STEPS = ((9, 1, 0), (1, 1, 5), (4, 0, 1))


@cache
def model(family: str) -> tuple[Any, Tensors]:
    traced = trace_model(tiny_config(family))
    return traced.graph, model_tensors(tiny_model(family), traced.buffers)


def compiled(family: str, options: CompileOptions) -> Any:
    return pipeline.run(model(family)[0], options)


CASES = [
    ("llama", CompileOptions("bf16")),
    ("qwen3", CompileOptions("fp32")),
    ("phi3", CompileOptions("fp32")),
    ("gemma2", CompileOptions("fp32")),
    ("gpt2", CompileOptions("fp32")),
    ("deepseek_v3", CompileOptions("bf16", kv_dtype="f32")),
    ("llama", CompileOptions("fp8", fp8_activations="none", lm_head_dtype="fp8")),
    ("llama", CompileOptions("fp8", fp8_activations="token")),
    ("llama", CompileOptions("int8")),
    ("llama", CompileOptions("int4")),
    ("llama", CompileOptions("bf16", kv_dtype="f8e4m3", kv_scales=dict.fromkeys(range(2), ((0.5,) * 3, (0.25,) * 3)))),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda x: x if isinstance(x, str) else x.precision)
def test_onnx_computes_what_the_interpreter_computes(family: str, options: CompileOptions, tmp_path: Path) -> None:
    made, tensors = compiled(family, options), model(family)[1]
    (graph,) = made.graphs
    (written,) = export_graphs([graph], made.kv_dtype, 4, tensors, tmp_path / "model.onnx")
    assert written.weights.stat().st_size == written.weights_bytes
    steps = OnnxSteps(written.model)
    params = params_of(tensors)
    here, there = (Batch(graph, CAPACITIES, block_size=4, kv_dtype=made.kv_dtype) for _ in range(2))
    rng = np.random.default_rng(0)
    for counts in STEPS:
        tokens = [rng.integers(0, VOCAB, n).tolist() for n in counts]
        (want,) = run(graph, *here.step(tokens, "all"), params)
        have = steps.run(*there.step(tokens, "all"))
        if options.precision == "int8" or (options.fp8_activations == "token" and options.precision == "fp8"):
            # An activation whose last bit differs may round to the neighbouring number.
            assert np.sqrt(np.mean((have - want) ** 2)) <= 3e-2 * np.sqrt(np.mean(want**2))
        else:
            np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-4 if made.kv_dtype == "f32" else 5e-3)


def test_inputs_by_constant_scales(tmp_path: Path) -> None:
    made, tensors = compiled("llama", CompileOptions("fp8", fp8_activations="token")), model("llama")[1]
    graph = made.graphs[0]
    nodes = [
        replace(n, attrs=replace(n.attrs, x_per_token=False, x_scale=0.01))
        if n.op == "linear" and n.attrs.x_per_token
        else n
        for n in graph
    ]
    graph = graph.with_nodes(nodes)
    (written,) = export_graphs([graph], made.kv_dtype, 4, tensors, tmp_path / "model.onnx")
    steps = OnnxSteps(written.model)
    here, there = (Batch(graph, (9,), block_size=4, kv_dtype=made.kv_dtype) for _ in range(2))
    tokens = [[5, 6, 7, 8]]
    (want,) = run(graph, *here.step(tokens, "all"), params_of(tensors))
    have = steps.run(*there.step(tokens, "all"))
    assert np.sqrt(np.mean((have - want) ** 2)) <= 3e-2 * np.sqrt(np.mean(want**2))


def test_fp8_layers_are_q_dq() -> None:
    made = compiled("llama", CompileOptions("fp8", fp8_activations="token"))
    proto = onnx_model(made.graphs[0], made.kv_dtype, 16, "w").proto
    kinds = [node.op_type for node in proto.graph.node]
    linears = sum(node.op == "linear" and node.attrs.x_per_token for node in made.graphs[0])
    assert kinds.count("QuantizeLinear") == linears > 0
    assert kinds.count("DequantizeLinear") == 2 * linears


@pytest.mark.parametrize("name", sorted(ARITY))
def test_functions(name: str) -> None:
    expr = f"{name}({', '.join(f'i{i}' for i in range(ARITY[name]))})"
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.1, 3, (4, 5)).astype(np.float32) for _ in range(ARITY[name])]
    if name.startswith("logical") or name in ("where", "eq", "ne", "relu", "sign", "abs"):
        arrays = [np.round(a - 1).astype(np.float32) for a in arrays]
    kinds = {f"x{i}": TensorType("f32", (4, 5)) for i in range(len(arrays))}
    e = Emitter(kinds)
    out = e.formula(expr, list(kinds), 2)
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [4, 5]) for n in (*kinds, out)]
    graph = helper.make_graph(e.nodes, "f", infos[:-1], infos[-1:], list(e.constants.values()))
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.checker.check_model(proto)
    (have,) = ReferenceEvaluator(proto).run(None, dict(zip(kinds, arrays, strict=True)))
    np.testing.assert_allclose(have, evaluate(expr, arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", CompileOptions("int4", tp=2), ("first group is", "columns short")),
        ("mamba2", CompileOptions("bf16"), ("ssd_scan (in backbone.layers.0", "causal_conv")),
    ],
)
def test_what_has_no_onnx_form_is_refused_by_name(family: str, options: CompileOptions, words: tuple[str, ...]) -> None:
    made = compiled(family, options)
    with pytest.raises(UnsupportedError) as refusal:
        onnx_model(made.graphs[-1], made.kv_dtype, 16, "w")
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", CompileOptions("fp32")),
        ("mixtral", CompileOptions("int4")),
        ("glm4_moe", CompileOptions("fp8", fp8_activations="none")),
    ],
)
def test_experts(family: str, options: CompileOptions, tmp_path: Path) -> None:
    config = small_config(family)
    owner = random_model(config)
    traced = trace_model(config, {name: tuple(value.shape) for name, value in owner.state_dict().items()})
    made, tensors = pipeline.run(traced.graph, options), model_tensors(owner, traced.buffers)
    (written,) = export_graphs(made.graphs, made.kv_dtype, 4, tensors, tmp_path / "model.onnx")
    here, there = (Batch(made.graphs[0], (9, 5), block_size=4, kv_dtype=made.kv_dtype) for _ in range(2))
    tokens = [[5, 6, 7, 8, 9], [11, 12]]
    (want,) = run(made.graphs[0], *here.step(tokens, "all"), params_of(tensors))
    have = OnnxSteps(written.model).run(*there.step(tokens, "all"))
    np.testing.assert_allclose(have, want, rtol=2e-4, atol=5e-3)


def test_ranks_meet_in_their_sums(tmp_path: Path) -> None:
    made, tensors = compiled("llama", CompileOptions("fp32", tp=2)), model("llama")[1]
    written = export_graphs(made.graphs, made.kv_dtype, 4, tensors, tmp_path / "model.onnx")
    assert [rank.model.name for rank in written] == ["model.rank0.onnx", "model.rank1.onnx"]
    exchange = Exchange(2, 60)
    ranks = [OnnxSteps(w.model, partial(exchange.all_reduce, rank)) for rank, w in enumerate(written)]
    here, there = ([Batch(g, CAPACITIES, block_size=4, kv_dtype=made.kv_dtype) for g in made.graphs] for _ in range(2))
    for tokens in ([[5, 6, 7, 8, 9], [11, 12], []], [[6], [7], [9, 10]]):
        steps = [batch.step(tokens, "all") for batch in here]
        want = run_ranks(made.graphs, steps[0][0], [context for _, context in steps], params_of(tensors))
        with ThreadPoolExecutor(2) as pool:
            have = pool.map(lambda rank, step: rank.run(*step), ranks, [batch.step(tokens, "all") for batch in there])
            for own, (expected,) in zip(have, want, strict=True):
                np.testing.assert_allclose(own, expected, rtol=2e-4, atol=2e-4)


def test_a_rank_alone_says_what_it_lacks(tmp_path: Path) -> None:
    made, tensors = compiled("llama", CompileOptions("fp32", tp=2)), model("llama")[1]
    first, _ = export_graphs(made.graphs, made.kv_dtype, 4, tensors, tmp_path / "model.onnx")
    batch = Batch(made.graphs[0], (4,), block_size=4, kv_dtype=made.kv_dtype)
    with pytest.raises(ValueError, match="one rank of several"):
        OnnxSteps(first.model).run(*batch.step([[5, 6]]))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "i8", "u4"])
@pytest.mark.parametrize(("shape", "gated"), [((70, 9), False), ((70, 9), True), ((70,), False), ((3, 40, 5), True)])
def test_unpacking_undoes_packing(dtype: str, shape: tuple[int, ...], gated: bool) -> None:
    if dtype in ("i8", "u4") and len(shape) == 1:
        pytest.skip("vectors are never so rounded")
    numbers = np.random.default_rng(0).normal(size=shape) * 3
    value = (np.abs(numbers) if dtype == "u4" else numbers).astype(NUMPY_DTYPES[dtype])
    back = unpack_panels(pack_panels(value, 64, gated=gated), shape, gated=gated)
    assert back.tobytes() == value.tobytes()
