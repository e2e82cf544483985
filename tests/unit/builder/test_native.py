"""Compiled engines beside the interpreter: families, ranks, precisions, ISA levels; and what the ABI refuses."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.plan import machine_features
from llmc.builder import pipeline
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.builder.trace import trace_model
from llmc.profiles import load_target
from llmc.runtime.native import RankFailure, StepRefused
from tests.models import VOCAB, tiny_config, tiny_model
from tests.unit.builder.native_engine import Engines, compile_all, lower_for_test
from tests.unit.builder.weights_of import Tensors, model_tensors, params_of

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)

#: family, ranks, precision. The other families run from end to end in tests/e2e.
CASES = [
    ("llama", 1, "fp32"), ("llama", 3, "fp32"), ("llama", 2, "fp8"), ("gemma2", 2, "fp32"), ("gpt2", 1, "fp8"),
    ("llama", 2, "int4"), ("llama", 2, "int8"),
]  # fmt: skip
CAPACITIES = (60, 40, 30, 20)
BLOCKS = sum(-(-tokens // 16) for tokens in CAPACITIES)
#: Tokens of each sequence in each step: both token ranges, chunks that go on, sequences that join and sit out.
STEPS = ((20, 1, 3, 0), (1, 1, 1, 9), (1, 0, 0, 0), (30, 30, 2, 1), (1, 0, 1, 1))
V4 = set(load_target("cpu:x86-64-v4").features) <= machine_features()


@cache
def model(family: str) -> tuple[Any, Tensors]:
    traced = trace_model(tiny_config(family))
    return traced.graph, model_tensors(tiny_model(family), traced.buffers)


@cache
def compiled(case: tuple[str, int, str]) -> Compiled:
    family, tp, precision = case
    options = CompileOptions(precision=precision, kv_dtype="f32", tp=tp, fp8_activations="token")
    return pipeline.run(model(family)[0], options)


@cache
def codes(target: str, cases: tuple[tuple[str, int, str], ...]) -> dict[tuple[str, int, str], list[bytes]]:
    return dict(zip(cases, compile_all([lower_for_test(compiled(c), target=target) for c in cases]), strict=True))


def engines(case: tuple[str, int, str], target: str = "cpu", threads: int = 1) -> Engines:
    cases = tuple(CASES) if target == "cpu" else (case,)
    lowered = lower_for_test(compiled(case), target=target)
    return Engines(lowered, codes(target, cases)[case], model(case[0])[1], BLOCKS, threads)


def batch(case: tuple[str, int, str], rank: int = 0) -> Batch:
    return Batch(compiled(case).graphs[rank], CAPACITIES, block_size=16)


def native_logits(case: tuple[str, int, str], steps: Any = STEPS, **options: Any) -> list[np.ndarray]:
    """The logits of every token, by step."""
    rng, running, made = np.random.default_rng(0), batch(case), []
    built = engines(case, **options)
    for counts in steps:
        tokens = [rng.integers(0, VOCAB, n).tolist() for n in counts]
        made.append(built.run(*running.step(tokens)))
    built.close()
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_engines_compute_what_the_interpreter_computes(case: tuple[str, int, str]) -> None:
    graphs = compiled(case).graphs
    tensors = model(case[0])[1]
    params = params_of(tensors)
    batches = [batch(case, rank) for rank in range(len(graphs))]
    rng = np.random.default_rng(0)
    for counts, have in zip(STEPS, native_logits(case), strict=True):
        tokens = [rng.integers(0, VOCAB, n).tolist() for n in counts]
        prepared = [b.step(tokens) for b in batches]
        shards = [out[0] for out in run_ranks(graphs, prepared[0][0], [c for _, c in prepared], params)]
        want = shards[0] if shards[0].shape[1] == VOCAB else np.concatenate(shards, axis=1)
        if case[2] in ("fp8", "int8"):  # an activation whose last bit differs may round to the neighbouring number
            assert np.sqrt(np.mean((have - want) ** 2)) <= 3e-2 * np.sqrt(np.mean(want**2))
        else:
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["fp32", "fp8-tp2"])
def test_threads_change_no_bit(case: tuple[str, int, str]) -> None:
    alone = native_logits(case)
    for threads in (2, 3):
        assert all(map(np.array_equal, native_logits(case, threads=threads), alone))


@pytest.mark.skipif(not V4, reason="this machine has no AVX-512")
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["fp32", "fp8-tp2"])
def test_isa_levels_agree_bit_for_bit(case: tuple[str, int, str]) -> None:
    assert all(map(np.array_equal, native_logits(case, target="cpu:x86-64-v4"), native_logits(case)))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], *CASES[5:]], ids=["fp32", "fp8-tp2", "int4-tp2", "int8-tp2"])
def test_chunks_and_company_change_no_bit(case: tuple[str, int, str]) -> None:
    ids = np.random.default_rng(3).integers(0, VOCAB, 33).tolist()

    def last_row(chunks: list[int], beside: int) -> np.ndarray:
        running, built, rng, start = batch(case), engines(case), np.random.default_rng(beside), 0
        for count in chunks:
            other = rng.integers(0, VOCAB, min(beside, 3)).tolist()
            logits = built.run(*running.step([ids[start : start + count], other, [], []]))
            start += count
        built.close()
        return logits[0]

    want = last_row([33], 0)
    for chunks, beside in (([33], 3), ([1] * 5 + [28], 0), ([4, 4, 25], 2), ([20, 13], 1)):
        assert np.array_equal(last_row(chunks, beside), want), (chunks, beside)


def refuse(change: Any, case: tuple[str, int, str] = CASES[0]) -> None:
    """Runs a valid step after `change(inputs, context)` has returned a bad one."""
    built = engines(case)
    inputs, context = batch(case).step([[1, 2, 3], [4], [], []])
    built.run(inputs, context)
    with pytest.raises(StepRefused):
        built.run(*change(inputs, context))
    built.run(inputs, context)
    built.close()


def with_context(**fields: Any) -> Any:
    return lambda inputs, context: (inputs, dataclasses.replace(context, **fields))


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs, context: ({**inputs, "rows": i32(4)}, context),
        lambda inputs, context: ({**inputs, "rows": i32(-1)}, context),
        lambda inputs, context: ({**inputs, "rows": np.zeros(5, np.int32)}, context),
        lambda inputs, context: ({**inputs, "ids": i32(1, 2, VOCAB, 4)}, context),
        lambda inputs, context: ({**inputs, "ids": i32(1, -1, 3, 4)}, context),
        lambda inputs, context: ({**inputs, "positions": i32(0, 1, 256, 0)}, context),
        lambda inputs, context: ({**inputs, "positions": i32(0, 1, 2, -1)}, context),
        with_context(query_start=i32(0, 3, 5)),
        with_context(query_start=i32(1, 3, 4)),
        with_context(query_start=i32(0, 4, 4)),
        with_context(context_len=i32(2, 1)),
        with_context(context_len=i32(3, 257)),
        with_context(block_tables=np.full((2, 4), BLOCKS, np.int32)),
        with_context(block_tables=np.full((2, 4), -1, np.int32)),
        with_context(context_len=i32(3, 100)),
    ],
    ids=[
        "row-behind", "row-before", "rows-too-many", "id-beyond", "id-negative", "position-beyond",
        "position-negative", "tokens-beyond", "tokens-before", "sequence-empty",
        "context-short", "context-beyond-profile", "block-beyond-pool", "block-negative", "table-too-short",
    ],
)  # fmt: skip
def test_steps_that_would_leave_their_memory_are_refused(change: Any) -> None:
    refuse(change)


def test_more_tokens_than_compiled_are_refused() -> None:
    built, running = engines(CASES[0]), Batch(compiled(CASES[0]).graphs[0], (100,), block_size=16)
    with pytest.raises(StepRefused, match="65 tokens"):
        built.run(*running.step([list(range(65))]))
    built.close()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("rank", 1, "this code is rank 0 of 1, not rank 1 of 1"),
        ("threads", 0, "threads is 0; 1 to 1024"),
        ("num_blocks", 0, "num_blocks is 0"),
        ("weights", np.empty(0, np.uint8), "weights is null"),
        ("arena", np.empty(0, np.uint8), "arena is null"),
    ],
)
def test_memory_that_does_not_fit_is_refused_with_the_reason(field: str, value: Any, reason: str) -> None:
    built = engines(CASES[0])
    memory = dataclasses.replace(built.engines[0]._memory, **{field: value})
    with pytest.raises(EnvironmentFault, match=reason):
        built.libraries[0].create(memory)
    built.close()


def test_memory_off_a_cache_line_is_refused() -> None:
    built = engines(CASES[0])
    memory = built.engines[0]._memory
    with pytest.raises(EnvironmentFault, match="kv does not start on a 64-byte boundary"):
        built.libraries[0].create(dataclasses.replace(memory, kv=memory.kv[4:]))
    built.close()


def test_an_abort_ends_the_wait_for_another_rank() -> None:
    case = CASES[2]
    built = engines(case)
    built.libraries[0].abort(built.engines[0]._memory.comm)
    inputs, context = batch(case).step([[1, 2], [], [], []])
    with pytest.raises(RankFailure):
        built.run(inputs, context)
    built.close()
