"""Counts the instructions of kernel launches under callgrind: a number that no busy machine changes.

    python -m tests.perf.instructions            # prints the counts beside the recorded ones
    python -m tests.perf.instructions --record   # after a change of a kernel that is meant to change them

A child process runs each launch under valgrind, once and three times over. The counts belong to a compiler: they are
recorded with its version, for x86-64-v3 and one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, KVScales, TensorType
from llmc.plugins import OPERATORS, cpu_launch, linear, paged_attention, rms_norm, rope_cache
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer
from llmc.plugins.paged_attention.cpu import layer_bytes
from llmc.runtime.native import RankStruct
from llmc.runtime.native_sampler import SampledStruct, SamplingStruct
from tests.unit.plugins.compiled import aligned, compile_library
from tests.unit.plugins.harness import Library
from tests.unit.plugins.native_step import Step

RECORD = Path(__file__).with_name("instructions.json")
ISA = "x86-64-v3"
#: How often a launch runs in two counts: their difference is what a launch takes, without what surrounds it.
_TIMES = (1, 3)
BLOCK, CONTEXT, VOCAB = 16, 512, 49152
#: Of attention that sees the end of the context alone.
WINDOW = 128
#: Counts what happens inside a call and nothing else: valgrind's requests to callgrind, as its header encodes them (the
#: sequence of instructions does nothing outside of valgrind).
_MEASURED = """
#include <cstdint>
static void request(uint64_t code, const void* argument) {
  volatile uint64_t words[6] = {0x43540000 + code, uint64_t(argument), 0, 0, 0, 0};
  uint64_t result = 0;
  asm volatile("rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi; xchgq %%rbx, %%rbx"
               : "+d"(result) : "a"(&words[0]) : "cc", "memory");
}
constexpr uint64_t kZero = 1, kDump = 3, kStart = 4, kStop = 5;
extern "C" int measured(int (*function)(const void*), const void* argument, const char* name) {
  request(kStart, nullptr);
  request(kZero, nullptr);
  const int result = function(argument);
  request(kDump, name);
  request(kStop, nullptr);
  return result;
}
"""
_SAMPLER = """
#include "plugins/sampler/cpu.h"
struct Rows {
  const float* logits;
  int32_t vocab;
  const llmc_sampling* row;
  llmc_sampled* out;
  float* scratch;
  int32_t* ids;
  int32_t times;
};
extern "C" int sample(const Rows* r) {
  for (int32_t i = 0; i < r->times; ++i)
    llmc_sample(r->logits, 1, r->vocab, r->row, r->out, r->ids, r->scratch, 0, r->scratch, r->ids);
  return 0;
}
"""


@dataclass(frozen=True)
class Case:
    """A launch of SmolLM2-135M's shapes with `rows` tokens, compiled for steps of `range_` tokens, beside a cache in
    `kv_dtype`.
    """

    name: str
    operator: str
    attrs: object
    inputs: tuple[TensorType, ...]
    rows: int
    range_: tuple[int, int]
    kv_dtype: str = "bf16"

    def call(self) -> CpuCall:
        env = KernelEnv(self.range_, self.range_, 1, BLOCK, self.kv_dtype, _kv_bytes(), {0: 0}, 64, CONTEXT)
        outputs = OPERATORS[self.operator].infer(self.attrs, self.inputs)
        call: CpuCall = cpu_launch(self.operator)(self.attrs, self.inputs, outputs, env)
        return call

    def types(self) -> dict[Pointer, str]:
        return {Pointer("in", i): kind.dtype for i, kind in enumerate(self.inputs)}


def _kv_bytes() -> int:
    """Of a block, in the larger of the dtypes."""
    return layer_bytes(3, 64, 64, BLOCK, "bf16")


def _linear(dtype: str, rows: int, range_: tuple[int, int]) -> Case:
    x, w = TensorType("f32", ("T", 576)), TensorType(dtype, (960, 576))
    scales = (TensorType("f32", (960,)),) if dtype in ("f8e4m3", "i8") else ()
    if dtype == "u4":
        scales = (TensorType("f16", (960, linear.groups(576))), TensorType("u4", (960, linear.groups(576))))
    attrs = linear.Attrs(x_per_token=dtype == "i8")
    return Case(f"linear {dtype}, {rows} rows", "linear", attrs, (x, w, *scales), rows, range_)


def _gated(rows: int, range_: tuple[int, int]) -> Case:
    """Gate and up in one, as the MLP has them."""
    inputs = (TensorType("f32", ("T", 576)), TensorType("f8e4m3", (3072, 576)), TensorType("f32", (3072,)))
    attrs = linear.Attrs(epilogue="silu_gate")
    return Case(f"linear f8e4m3 with silu_gate, {rows} rows", "linear", attrs, inputs, rows, range_)


def _rope(kv_dtype: str, rows: int, range_: tuple[int, int]) -> Case:
    attrs = rope_cache.Attrs(0, 9, 3, 64, rotary=64, kv_scales=_kv_scales(kv_dtype))
    inputs = tuple(TensorType("f32", ("T", width)) for width in (576, 192, 192, 64, 64))
    return Case(f"rope_cache {kv_dtype}, {_tokens(rows)}", "rope_cache", attrs, inputs, rows, range_, kv_dtype)


def _kv_scales(kv_dtype: str) -> KVScales | None:
    return ((0.5,) * 3, (0.25,) * 3) if kv_dtype == "f8e4m3" else None


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _attention(kv_dtype: str, rows: int, range_: tuple[int, int], window: int | None = None) -> Case:
    attrs = paged_attention.Attrs(0, 9, 3, 64, 0.125, window=window, kv_scales=_kv_scales(kv_dtype))
    name = f"paged_attention {kv_dtype}, {_tokens(rows)} of {CONTEXT}" + (f", window {window}" if window else "")
    return Case(name, "paged_attention", attrs, (TensorType("f32", ("T", 9, 64)),), rows, range_, kv_dtype)


#: The ranges of the chat profile.
CASES = [
    *(
        _linear(dtype, *size)
        for dtype in ("f8e4m3", "bf16", "i8", "u4")
        for size in ((1, (1, 1)), (4, (2, 16)), (64, (17, 512)))
    ),
    *(_gated(*size) for size in ((1, (1, 1)), (4, (2, 16)), (64, (17, 512)))),
    *(_attention(kv_dtype, *size) for kv_dtype in ("bf16", "f8e4m3") for size in ((1, (1, 1)), (64, (17, 512)))),
    *(_attention("bf16", *size, window=WINDOW) for size in ((1, (1, 1)), (64, (17, 512)))),
    # Of the small ones many rows alone: what surrounds a launch differs by hundreds of instructions from run to run.
    *(_rope(kv_dtype, 64, (17, 512)) for kv_dtype in ("bf16", "f8e4m3")),
    Case(
        "rms_norm, 64 rows",
        "rms_norm",
        rms_norm.Attrs(1e-5, True),
        (TensorType("f32", ("T", 576)), TensorType("f32", (576,)), TensorType("f32", ("T", 576))),
        64,
        (17, 512),
    ),
]
SAMPLER = f"sampler, top-p 0.9 of {VOCAB}"


@cache
def library() -> Library:
    """All launches, compiled."""
    return Library([case.call() for case in CASES], ISA, [case.types() for case in CASES])


def _value(kind: TensorType, rows: int, rng: np.random.Generator) -> np.ndarray:
    shape = [rows if d == "T" else int(d) for d in kind.shape]
    values = rng.standard_normal(shape, np.float32)
    return aligned(values.astype(ml_dtypes.float8_e4m3fn if kind.dtype == "f8e4m3" else NUMPY_DTYPES[kind.dtype]))


def _measured(name: str) -> Callable[[Any, Any], int]:
    """Calls a compiled function so that callgrind counts it under this name."""
    function = ctypes.CDLL(str(compile_library(_MEASURED, ISA))).measured
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]

    def call(inner: Any, argument: Any) -> int:
        pointer = ctypes.cast(argument, ctypes.c_void_p)
        return int(function(ctypes.cast(inner, ctypes.c_void_p), pointer, name.encode()))

    return call


def _run(index: int) -> None:
    """One launch, on one thread; what weights hold does not decide the count."""
    case, rng = CASES[index], np.random.default_rng(0)
    inputs = [_value(kind, case.rows, rng) for kind in case.inputs]
    outputs = [_value(kind, case.rows, rng) for kind in OPERATORS[case.operator].infer(case.attrs, case.inputs)]
    blocks = CONTEXT // BLOCK
    kv = aligned(np.full(_kv_bytes() * blocks // 2, 0x3F80, np.uint16))
    rank = RankStruct(0, 1, 1)
    rank.kv, rank.num_blocks = kv.ctypes.data, blocks
    table = np.arange(blocks, dtype=np.int32).reshape(1, -1)
    held = Step(np.array([0, case.rows], np.int32), np.array([CONTEXT], np.int32), table)
    step = held.struct()  # which has addresses of its arrays
    addresses = {"rank": ctypes.addressof(rank), "step": ctypes.addressof(step)}
    for times in _TIMES:
        call = _measured(f"{case.name} x{times}")
        library().run(index, inputs, outputs, tokens=case.rows, rows=case.rows, repeat=times, call=call, **addresses)


class _Rows(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("vocab", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("row", "out", "scratch", "ids")),
        ("times", ctypes.c_int32),
    )


def _sample() -> None:
    logits = aligned(np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32) * 3)
    row = SamplingStruct(temperature=0.8, top_p=0.9, repetition_penalty=1.0, num_logprobs=-1, seed=1)
    out, scratch, ids = SampledStruct(), np.zeros(VOCAB, np.float32), np.zeros(VOCAB, np.int32)
    rows = _Rows(logits.ctypes.data, VOCAB, ctypes.addressof(row), ctypes.addressof(out), scratch.ctypes.data,
                 ids.ctypes.data)  # fmt: skip
    function = ctypes.CDLL(str(compile_library(_SAMPLER, ISA))).sample
    for times in _TIMES:
        rows.times = times
        _measured(f"{SAMPLER} x{times}")(function, ctypes.byref(rows))
    assert 0 <= out.token < VOCAB


def count() -> dict[str, int]:
    """Instructions of each launch, by name. Needs valgrind."""
    library()
    for text in (_MEASURED, _SAMPLER):
        compile_library(text, ISA)  # outside of valgrind
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out",
                   sys.executable, "-m", "tests.perf.instructions", "--child"]  # fmt: skip
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        dumps = [path.read_text() for path in Path(folder).iterdir()]
    found = {}
    for text in dumps:
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)$", text, re.MULTILINE)
        if name and total:
            found[name[1]] = int(total[1])
    once, more = _TIMES
    names = (*(case.name for case in CASES), SAMPLER)
    return {name: (found[f"{name} x{more}"] - found[f"{name} x{once}"]) // (more - once) for name in names}


def toolchain() -> str:
    """The compiler's version, without the distribution's own part."""
    return subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Prints, records, or runs the launches as the child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        for index in range(len(CASES)):
            _run(index)
        _sample()
        return
    counts = count()
    recorded = json.loads(RECORD.read_text())["counts"] if RECORD.exists() else {}
    for name, number in counts.items():
        before = recorded.get(name)
        print(f"{name:52} {number:12,}" + (f" {number / before - 1:+8.1%}" if before else ""))
    if options.record:
        RECORD.write_text(json.dumps({"g++": toolchain(), "isa": ISA, "counts": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
