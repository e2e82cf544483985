"""Whole tiny models of the wide ISA levels beside the interpreter; emulated where this machine lacks a level."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.schema import TokenRange
from llmc.builder import pipeline
from llmc.builder.cpu.program import CpuLowered
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.profiles import load_cpu_target
from tests.emulated import runnable, runs_here
from tests.models import VOCAB
from tests.unit.builder.native_engine import PROFILE, Engines, compile_all, lower_for_test
from tests.unit.builder.test_native import BLOCKS, CAPACITIES, STEPS, model
from tests.unit.builder.weights_of import params_of

pytestmark = pytest.mark.timeout(600)

#: Its linear layers' columns are multiples of 32, which AMX takes.
FAMILY = "mistral"
#: Level -> precision, and how far logits may turn away from the interpreter's: 1 - cosine.
LEVELS = {"x86-64-v4": ("fp32", 1e-9), "x86-64-v4-bf16": ("bf16", 2e-4), "x86-64-amx": ("fp8", 2e-4)}


@cache
def compiled(level: str) -> Compiled:
    options = CompileOptions(precision=LEVELS[level][0], kv_dtype="f32", fp8_activations="none")
    return pipeline.run(model(FAMILY)[0], options)


@cache
def code(level: str) -> tuple[CpuLowered, list[bytes]]:
    target = load_cpu_target(f"cpu:{level}")
    profile = dataclasses.replace(PROFILE, token_ranges=(TokenRange(1, 64, 64),))
    lowered = lower_for_test(compiled(level), profile, str(target))
    emulated = dataclasses.replace(lowered, target=runnable(target))
    return emulated, compile_all([emulated])[0]


def engines(level: str) -> Engines:
    lowered, libraries = code(level)
    return Engines(lowered, libraries, model(FAMILY)[1], BLOCKS, 2)


def batch(level: str) -> Batch:
    return Batch(compiled(level).graphs[0], CAPACITIES, block_size=16)


@pytest.mark.parametrize("level", LEVELS)
def test_engines_compute_what_the_interpreter_computes(level: str) -> None:
    running, built, rng = batch(level), engines(level), np.random.default_rng(0)
    params = params_of(model(FAMILY)[1])
    for counts in STEPS:
        inputs, context = running.step([rng.integers(0, VOCAB, n).tolist() for n in counts])
        have = built.run(inputs, context).astype(np.float64)
        want = run_ranks(compiled(level).graphs, inputs, [context], params)[0][0].astype(np.float64)
        cosine = (have * want).sum() / np.sqrt((have**2).sum() * (want**2).sum())
        assert 1 - cosine < LEVELS[level][1]
    built.close()


@pytest.mark.parametrize("level", LEVELS)
def test_chunks_and_company_change_no_bit(level: str) -> None:
    ids = np.random.default_rng(3).integers(0, VOCAB, 33).tolist()

    def last_row(chunks: list[int], beside: int) -> np.ndarray:
        running, built, rng, start = batch(level), engines(level), np.random.default_rng(beside), 0
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
        engines("x86-64-amx")
