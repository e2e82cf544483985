"""What choosing tokens costs: rows of random logits through the native sampler, called as the runtime calls it.

    python -m tests.perf.sampler [--rows 64] [--threads 1 2] [--isa x86-64-v3 x86-64-amx] [--step-ms 29.3]

Goes out: a table in milliseconds, or with `--step-ms` as a share of that time, too. Logits are normal with deviation
`--spread`; the best of the repetitions counts, in which the modes take turns: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from array import array

import numpy as np

from llmc.runtime.native import Library
from llmc.runtime.native_sampler import Sampler, SamplingRow
from tests.unit.plugins.compiled import BF16_ISAS, ISAS, aligned, compile_library

VOCABULARIES = (49_152, 128_256, 262_144)
_HISTORY = 200
MODES = {
    "greedy": SamplingRow(0),
    "temperature": SamplingRow(0.8),
    "top-k 50": SamplingRow(0.8, top_k=50),
    "top-p 0.9": SamplingRow(0.8, top_p=0.9),
    "top-p, T 1": SamplingRow(1, top_p=0.9),
    "min-p 0.05": SamplingRow(0.8, min_p=0.05),
    "penalties": SamplingRow(0, repetition_penalty=1.1, presence_penalty=0.2),
}
#: A library of nothing but a sampler.
_SOURCE = """
#include "plugins/sampler/cpu.h"
extern "C" int32_t llmc_abi_version() { return LLMC_ABI_VERSION; }
extern "C" void* llmc_create(const llmc_rank*, char*, int32_t) { return nullptr; }
extern "C" int32_t llmc_run(void*, const llmc_step*) { return 1; }
extern "C" void llmc_destroy(void*) {}
extern "C" void llmc_abort(uint8_t*) {}
"""


def rows_of(mode: str, count: int, vocab: int) -> list[SamplingRow]:
    """Each with its own seed; with a history where penalties look at one."""
    row, rng = MODES[mode], np.random.default_rng(1)
    if row.repetition_penalty != 1:
        prompt, output = (array("i", rng.integers(0, vocab, _HISTORY).tolist()) for _ in range(2))
        row = dataclasses.replace(row, prompt=prompt, output=output)
    return [dataclasses.replace(row, seed=seed, counter=7) for seed in range(count)]


def measure(sampler: Sampler, logits: np.ndarray, repeat: int) -> dict[str, float]:
    """Seconds of each mode."""
    rows = {mode: rows_of(mode, *logits.shape) for mode in MODES}
    found = dict.fromkeys(MODES, float("inf"))
    for _ in range(repeat):
        for mode in MODES:
            start = time.perf_counter()
            sampler.sample(logits, rows[mode])
            found[mode] = min(found[mode], time.perf_counter() - start)
    return found


def main() -> None:
    """Prints a table for each level and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", nargs="+", default=[ISAS[-1]], choices=[*ISAS, *BF16_ISAS])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--step-ms", type=float, help="of the step whose logits these would be")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for vocab in options.vocab:
        logits = aligned(rng.standard_normal((options.rows, vocab), np.float32) * np.float32(options.spread))
        for isa in options.isa:
            library = Library(compile_library(_SOURCE, isa).read_bytes())
            for threads in options.threads:
                found = measure(library.sampler(vocab, options.rows, 20, threads), logits, options.repeat)
                print(f"{options.rows} rows of {vocab}, {isa}, {threads} threads")
                for mode, seconds in found.items():
                    share = f" {1e3 * seconds / options.step_ms:7.1%}" if options.step_ms else ""
                    print(f"  {mode:12} {1e3 * seconds:7.2f} ms{share}", flush=True)


if __name__ == "__main__":
    main()
