"""Recurrences between trace and engine: how functions are replaced, what is refused, ranks, precisions, memory."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import UnsupportedError
from llmc.builder import pipeline
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.memory import memory_plan
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.builder.slots import state_table
from llmc.builder.trace import Traced, trace_model
from llmc.builder.trace.recurrent_hook import recurrences
from llmc.builder.verify import Verifier
from llmc.plugins.cpu.recurrent import state_bytes
from llmc.runtime.native import StepRefused
from tests.models import VOCAB, tiny_config, tiny_model
from tests.unit.builder.native_engine import Engines, compile_all, lower_for_test
from tests.unit.builder.weights_of import Tensors, model_tensors, params_of

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)

CAPACITIES = (40, 30)


@cache
def traced(family: str) -> tuple[Traced, Tensors]:
    result = trace_model(tiny_config(family))
    return result, model_tensors(tiny_model(family), result.buffers)


@cache
def compiled(family: str, tp: int = 1, precision: str = "fp32") -> Compiled:
    """Every pass is verified."""
    result, tensors = traced(family)
    options = CompileOptions(
        precision=precision, tp=tp, fp8_activations="token", kv_dtype="f32", verifier=Verifier(params_of(tensors))
    )
    return pipeline.run(result.graph, options)


def test_functions_are_replaced_within_the_context_only() -> None:
    model = tiny_model("mamba2")
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    with recurrences(model):
        changed = {name for name, value in vars(home).items() if before[name] is not value}
    assert changed == {"causal_conv1d_fn", "mamba2_chunk_scan"}
    assert vars(home) == before


@pytest.mark.parametrize(
    ("family", "function", "tensors", "options", "error"),
    [
        ("mamba2", "causal_conv1d_fn", 2, {"seq_idx": 1}, "operator causal_conv1d_fn is called with seq_idx"),
        ("mamba2", "mamba2_chunk_scan", 6, {"initial_states": 1}, "mamba_chunk_scan_combined .* initial_states"),
        ("mamba", "mamba_selective_scan", 5, {"return_last_state": True}, "selective_scan_fn .* return_last_state"),
        ("olmo_hybrid", "torch_chunk_gated_delta_rule", 5, {"cu_seqlens": 1}, "chunk_gated_delta_rule .* cu_seqlens"),
    ],
)
def test_what_no_operator_does_is_refused_by_name(
    family: str, function: str, tensors: int, options: dict, error: str
) -> None:
    model = tiny_model(family)
    with recurrences(model), pytest.raises(UnsupportedError, match=error):
        getattr(sys.modules[type(model).__module__], function)(*[torch.zeros(1)] * tensors, **options)


def test_a_recurrence_without_a_kernel_is_refused() -> None:
    line = r"modeling_recurrent_gemma\.py:\d+: for t in range\(hidden_states\.shape\[1\]\)"
    with pytest.raises(UnsupportedError, match=f"RecurrentGemmaForCausalLM .* a loop over them .*{line}"):
        trace_model(tiny_config("recurrent_gemma"))


def test_states_are_numbered_and_laid_out_in_the_order_of_the_graph() -> None:
    graph = compiled("falcon_h1").graphs[0]
    states, size = state_table(graph, state_bytes)
    assert list(states) == [0, 1, 2, 3]
    assert [(s.layer, s.kind) for s in states.values()] == [
        (0, "causal_conv"), (0, "ssd_scan"), (1, "causal_conv"), (1, "ssd_scan")
    ]  # fmt: skip
    ends = [s.offset + s.nbytes for s in states.values()]
    assert all(s.offset % 64 == 0 for s in states.values())
    assert all(end <= later.offset for end, later in zip(ends, list(states.values())[1:], strict=False))
    assert ends[-1] <= size


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_projections_are_quantized_and_recurrences_are_not(family: str, precision: str) -> None:
    graph = compiled(family, precision=precision).graphs[0]
    kinds, producers = graph.types(), graph.producers()
    inner = [n for n in graph if n.op == "linear" and "lm_head" not in n.path]
    assert {kinds[n.inputs[1]].dtype for n in inner} == {"bf16" if precision == "bf16" else "f8e4m3"}
    for node in graph:
        if node.op in ("causal_conv", "ssd_scan"):
            assert {kinds[name].dtype for name in node.inputs} == {"f32"}
            assert all(producers[name].op != "cast" for name in node.inputs)


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_every_rank_carries_the_whole_state(family: str) -> None:
    one, two = compiled(family), compiled(family, tp=2)
    for graph in two.graphs:
        assert state_table(graph, state_bytes) == state_table(one.graphs[0], state_bytes)
    assert [columns for _, columns in two.vocab] != [VOCAB]  # what can be divided is


def test_memory_counts_the_states() -> None:
    lowered = lower_for_test(compiled("mamba2", tp=2))
    plan = memory_plan(lowered, "tiny", "fp32")
    slot = lowered.programs[0].state_slot_bytes
    assert plan.state_bytes == lowered.profile.max_num_seqs * 2 * slot > 0
    assert plan.fixed_bytes() > plan.state_bytes
    text = "\n".join(plan.lines())
    assert f"{2 * slot:,} B, whatever its length" in text
    assert "no layer has attention" in text


@pytest.mark.parametrize("tp", [1, 2])
def test_engines_compute_what_the_interpreter_computes(tp: int) -> None:
    result, (_, tensors) = compiled("mamba2", tp=tp), traced("mamba2")
    lowered = lower_for_test(result)
    (codes,) = compile_all([lowered])
    engines = Engines(lowered, codes, tensors, blocks=8)
    batches = [Batch(graph, CAPACITIES, block_size=16) for graph in result.graphs]
    rng = np.random.default_rng(0)
    for counts in ((11, 3), (1, 9), (0, 1), (7, 1)):
        tokens = [rng.integers(3, VOCAB, n).tolist() for n in counts]
        steps = [batch.step(tokens) for batch in batches]
        wanted = run_ranks(result.graphs, steps[0][0], [context for _, context in steps], params_of(tensors))
        got = engines.run(*steps[0])
        np.testing.assert_allclose(got, np.concatenate([w[0] for w in wanted], axis=-1), rtol=1e-4, atol=1e-5)
    arrays, context = batches[0].step([[5], [6]])
    for slots in ([0, 8], [-1, 1]):
        outside = dataclasses.replace(context, state_slots=np.array(slots, np.int32))
        with pytest.raises(StepRefused):
            engines.run(arrays, outside)
    engines.close()


def test_a_sequence_alone_gives_the_same_bits() -> None:
    result, (_, tensors) = compiled("mamba2"), traced("mamba2")
    lowered = lower_for_test(result)
    (codes,) = compile_all([lowered])
    engines = Engines(lowered, codes, tensors, blocks=8, threads=3)
    tokens = np.random.default_rng(1).integers(3, VOCAB, 20).tolist()

    def last(steps: list[list[list[int]]]) -> np.ndarray:
        batch, found = Batch(result.graphs[0], CAPACITIES, block_size=16), None
        for step in steps:
            found = engines.run(*batch.step(step))
        assert found is not None
        return found[0].copy()

    alone = last([[tokens, []]])
    together: Any = last([[tokens[:7], tokens[3:9]], [tokens[7:8], [9]], [tokens[8:], [9, 8]]])
    assert np.array_equal(alone, together)
    engines.close()
