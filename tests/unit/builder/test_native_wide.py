"""Whole tiny models of the wide ISA levels beside the interpreter; emulated where this machine lacks a level."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.schema import TokenRange
from llmc.artifacts.types import KVScales
from llmc.builder import pipeline
from llmc.builder.cpu.program import CpuLowered
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.builder.trace import trace_model
from llmc.profiles import load_cpu_target
from tests.emulated import runnable, runs_here
from tests.models import VOCAB, tiny_config, tiny_model
from tests.unit.builder.native_engine import PROFILE, Engines, compile_all, lower_for_test
from tests.unit.builder.test_native import BLOCKS, CAPACITIES, STEPS
from tests.unit.builder.weights_of import Tensors, model_tensors, params_of

pytestmark = pytest.mark.timeout(600)

#: Its linear layers' columns are multiples of 32, which AMX takes; so are its heads here.
FAMILY = "mistral"
#: Target, precision, dtype of the cache, and how far logits may turn away from the interpreter's: 1 - cosine.
Case = tuple[str, str, str, float]
CASES: list[Case] = [
    ("x86-64-v4", "fp32", "f32", 1e-9),
    ("x86-64-v4", "int4", "bf16", 1e-6),
    ("x86-64-v4-vnni", "int8", "f8e4m3", 1e-6),
    ("x86-64-v4-bf16", "bf16", "f32", 2e-4),
    ("x86-64-amx", "fp8", "bf16", 2e-4),
    ("x86-64-amx", "int8", "bf16", 2e-4),
    ("x86-64-amx", "int4", "f8e4m3", 2e-4),
]
IDS = ["-".join(case[:3]) for case in CASES]
SCALES = defaultdict[int, KVScales](lambda: ((0.02, 0.01), (0.01, 0.02)))


@cache
def model() -> tuple[Any, Tensors]:
    changes = {"head_dim": 32}
    traced = trace_model(tiny_config(FAMILY, **changes))
    return traced.graph, model_tensors(tiny_model(FAMILY, **changes), traced.buffers)


@cache
def compiled(case: Case) -> Compiled:
    options = CompileOptions(precision=case[1], kv_dtype=case[2], kv_scales=SCALES, fp8_activations="none")
    return pipeline.run(model()[0], options)


@cache
def code(case: Case) -> tuple[CpuLowered, list[bytes]]:
    target = load_cpu_target(f"cpu:{case[0]}")
    profile = dataclasses.replace(PROFILE, token_ranges=(TokenRange(1, 64, 64),))
    lowered = lower_for_test(compiled(case), profile, str(target))
    emulated = dataclasses.replace(lowered, target=runnable(target))
    return emulated, compile_all([emulated])[0]


def engines(case: Case) -> Engines:
    lowered, libraries = code(case)
    return Engines(lowered, libraries, model()[1], BLOCKS, 2)


def batch(case: Case) -> Batch:
    return Batch(compiled(case).graphs[0], CAPACITIES, block_size=16, kv_dtype=case[2])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_engines_compute_what_the_interpreter_computes(case: Case) -> None:
    running, built, rng = batch(case), engines(case), np.random.default_rng(0)
    params = params_of(model()[1])
    for counts in STEPS:
        inputs, context = running.step([rng.integers(0, VOCAB, n).tolist() for n in counts])
        have = built.run(inputs, context).astype(np.float64)
        want = run_ranks(compiled(case).graphs, inputs, [context], params)[0][0].astype(np.float64)
        cosine = (have * want).sum() / np.sqrt((have**2).sum() * (want**2).sum())
        assert 1 - cosine < case[3]
    built.close()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_chunks_and_company_change_no_bit(case: Case) -> None:
    ids = np.random.default_rng(3).integers(0, VOCAB, 33).tolist()

    def last_row(chunks: list[int], beside: int) -> np.ndarray:
        running, built, rng, start = batch(case), engines(case), np.random.default_rng(beside), 0
        for count in chunks:
            other = rng.integers(0, VOCAB, beside).tolist()
            logits = built.run(*running.step([ids[start : start + count], other, [], []]))
            start += count
        built.close()
        return logits[0]

    want = last_row([33], 0)
    assert np.array_equal(last_row([1] * 5 + [28], 0), want)
    assert np.array_equal(last_row([4, 4, 25], 2), want)


@pytest.mark.skipif(runs_here(load_cpu_target("cpu:x86-64-amx")), reason="this machine has tiles")
def test_says_when_the_system_withholds_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATE_NO_TILES", "1")
    with pytest.raises(EnvironmentFault, match=r"AMX's tiles .*not permitted.*cpu:x86-64-v4-bf16"):
        engines(CASES[4])
