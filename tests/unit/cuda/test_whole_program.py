"""Whole programs of the cuda targets beside the CPU engine of the same model: prefill in chunks, mixed steps,
decodes with empty sequences beside them; every precision, one rank and two. Interpreted; tests/gpu runs them, too.

The CPU engine multiplies in float32 and the programs round inputs to bf16, or with FP8 round them as FP8: the logits
differ by that, and the best tokens are the same wherever the CPU engine prefers one by more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.builder import pipeline
from llmc.builder.cuda.lower import lower
from llmc.builder.cuda.program import CudaLowered
from llmc.builder.cuda.variant import FP8_SM
from llmc.builder.interpreter import Batch
from llmc.builder.pipeline import CompileOptions
from llmc.builder.trace import trace_model
from llmc.profiles import CudaTarget, load_target
from llmc.tiny import tiny_config as any_tiny_config
from llmc.tiny_model import random_model
from tests.models import VOCAB, tiny_config
from tests.unit.builder.native_engine import Engines, compile_all, lower_for_test
from tests.unit.builder.weights_of import Tensors, model_tensors
from tests.unit.cuda.backend import architecture
from tests.unit.cuda.whole_program import BOUNDS, WholeProgram

torch.set_num_threads(1)
PROFILE = ShapeProfile("test", (TokenRange(1, 1, 4), TokenRange(5, 64, 64)), 8, 256, 16)
CAPACITIES = (30, 20, 20)
BLOCKS = sum(-(-tokens // 16) for tokens in CAPACITIES)
#: Tokens of each sequence in each step: prefill, a chunk beside decodes, decodes.
STEPS = ((17, 2, 0), (1, 1, 3), (1, 1, 1))
#: Where only the products are others: a prefill and decodes.
FEW = ((3, 2, 0), (1, 1, 1))
#: family, precision, ranks, steps. All steps once: what others than products do depends on no precision.
CASES = [
    ("llama", "bf16", 1, STEPS),
    ("llama", "fp8", 1, FEW),
    ("llama", "fp8", 2, FEW),
    ("llama", "fp32", 1, FEW),
    ("llama", "int8", 1, FEW),
    ("llama", "int4", 1, FEW),
    ("mamba2", "bf16", 1, FEW),
    ("mixtral", "bf16", 1, FEW),
    ("deepseek_v3", "bf16", 1, FEW),
]
#: Families whose sizes `tests.models` does not say.
UNSIZED = ("mixtral",)
#: One range, as bits are the same within one.
ONE_RANGE = ShapeProfile("one range", (TokenRange(1, 32, 32),), 8, 256, 16)


def lowered_for(precision: str, tp: int, profile: ShapeProfile, family: str = "llama") -> CudaLowered:
    target = load_target(f"cuda:sm_{architecture()}")
    assert isinstance(target, CudaTarget)
    compiled = pipeline.run(model(family)[0], options_of(precision, tp, rounds_apart=True))
    return lower(compiled.graphs, profile, target, compiled.kv_dtype, compiled.vocab)


@cache
def model(family: str = "llama") -> tuple[Any, Tensors]:
    config = any_tiny_config(family) if family in UNSIZED else tiny_config(family)
    traced = trace_model(config)
    return traced.graph, model_tensors(random_model(config), traced.buffers)


def steps(graph: Any, tokens: Sequence[Sequence[int]], run: Any) -> list[np.ndarray]:
    """The logits of each step; the same tokens for everybody."""
    rng, running = np.random.default_rng(0), Batch(graph, CAPACITIES, block_size=16)
    return [run(*running.step([rng.integers(0, VOCAB, n).tolist() for n in counts])) for counts in tokens]


def options_of(precision: str, tp: int, **more: Any) -> CompileOptions:
    """With the output head in FP8 where it is by default."""
    head = "fp8" if precision in ("int8", "int4") and architecture() >= FP8_SM else "bf16"
    return CompileOptions(
        precision=precision, kv_dtype="bf16", tp=tp, fp8_activations="token", lm_head_dtype=head, **more
    )


def cpu_logits(precision: str, tp: int, tokens: Sequence[Sequence[int]], family: str) -> list[np.ndarray]:
    graph, tensors = model(family)
    lowered = lower_for_test(pipeline.run(graph, options_of(precision, tp)), PROFILE)
    engines = Engines(lowered, compile_all([lowered])[0], tensors, BLOCKS)
    try:
        return steps(lowered.programs[0].graph, tokens, engines.run)
    finally:
        engines.close()


@pytest.mark.parametrize(("family", "precision", "tp", "tokens"), CASES, ids=[f"{f}-{p}-{tp}" for f, p, tp, _ in CASES])
def test_a_program_computes_what_the_cpu_engine_computes(
    family: str, precision: str, tp: int, tokens: Sequence[Sequence[int]]
) -> None:
    if precision == "fp8" and architecture() < FP8_SM:
        pytest.skip(f"sm_{architecture()} has no FP8")
    most = BOUNDS[precision]
    lowered = lowered_for(precision, tp, PROFILE, family)
    want = cpu_logits(precision, tp, tokens, family)
    program = WholeProgram(lowered, model(family)[1], BLOCKS)
    have = steps(lowered.programs[0].graph, tokens, lambda inputs, context: program.run(inputs, context, padded=2))
    clear = 0
    for counts, mine, theirs in zip(tokens, have, want, strict=True):
        scale = np.sqrt(np.mean(theirs**2))
        assert np.sqrt(np.mean((mine - theirs) ** 2)) <= most * scale, counts
        ordered = np.sort(theirs, axis=1)
        sure = ordered[:, -1] - ordered[:, -2] > 2 * most * scale
        assert (mine.argmax(axis=1) == theirs.argmax(axis=1))[sure].all()
        clear += sure.sum()
    assert clear, "no step has a best token that rounding cannot change"


def test_a_token_has_the_same_bits_whatever_is_computed_beside_it() -> None:
    """Chunks of a prompt, and other sequences: in mixed steps those of a mixed step, in decode steps those of a decode
    step. Between the two kinds tiles and parts of the context are cut otherwise.
    """
    lowered = lowered_for("bf16", 1, ONE_RANGE)
    program = WholeProgram(lowered, model()[1], BLOCKS)
    batch = Batch(lowered.programs[0].graph, CAPACITIES, block_size=16)

    def logits(*tokens: Sequence[int], padded: int = 0) -> np.ndarray:
        return program.run(*batch.step(tokens), padded=padded)

    prompt, other = np.random.default_rng(3).integers(0, VOCAB, (2, 9)).tolist()
    whole = logits(prompt, prompt[:5], [])[0]
    in_chunks = logits([], prompt[5:], other)[0]
    np.testing.assert_array_equal(whole, in_chunks)
    alone = logits([7], [], [])[0]
    beside = logits([], [7], [9], padded=2)[0]
    np.testing.assert_array_equal(alone, beside)
