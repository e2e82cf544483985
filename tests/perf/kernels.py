"""Prints the speed of linear beside this machine's limits, measured in the same run. Not a test: no time is asserted.

    python -m tests.perf.kernels [--isa x86-64-v3] [--threads 1,2]

Limits: reads of a buffer larger than the caches, and independent multiply-adds. Weights come from a buffer of many
matrices in turn, so that they are not in a cache, as in a decode step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer, Product
from llmc.plugins.linear import Attrs, groups, infer
from llmc.plugins.linear.cpu import launch
from tests.unit.plugins.compiled import BF16_ISAS, ISAS, aligned
from tests.unit.plugins.harness import Library

MAX_ROWS = 512
COLD_BYTES = 256 << 20

#: Two kernels that do nothing but read, and nothing but multiply.
LIMITS = """
inline void read_all(const Ctx& c, int tid, const float* x, int64_t count, float* y) {
  const Share mine = share(count / 64, tid, c.threads);
  Lanes a = splat(0), b = a, d = a, e = a;
  for (int64_t i = mine.first; i < mine.last; ++i) {
    __builtin_prefetch(x + 64 * i + 1024);
    a = a + load(x + 64 * i); b = b + load(x + 64 * i + 16);
    d = d + load(x + 64 * i + 32); e = e + load(x + 64 * i + 48);
  }
  y[16 * tid] = sum(a + b + (d + e));
}
inline void multiply(const Ctx&, int tid, int64_t count, float* y) {
  constexpr int chains = LLMC_WIDE ? 12 : 6;  // no more than registers
  Lanes a[chains];
  for (int i = 0; i < chains; ++i) a[i] = iota() + splat(float(i));
  for (int64_t k = 0; k < 12 * count / chains; ++k)
#pragma GCC unroll 12
    for (int i = 0; i < chains; ++i) a[i] = fma(a[i], splat(0.999f), splat(0.001f));
  for (int i = 1; i < chains; ++i) a[0] = a[0] + a[i];
  y[16 * tid] = sum(a[0]);
}
"""


@dataclass(frozen=True)
class Case:
    """One linear of SmolLM2-135M."""

    name: str
    k: int
    n: int
    dtype: str
    gated: bool = False

    def types(self) -> list[TensorType]:
        inputs = [TensorType("f32", ("T", self.k)), TensorType(self.dtype, (self.n, self.k))]
        if self.dtype == "u4":
            by_group = (self.n, groups(self.k))
            return [*inputs, TensorType("f16", by_group), TensorType("u4", by_group)]
        return [*inputs, *[TensorType("f32", (self.n,))] * (self.dtype in ("f8e4m3", "i8"))]

    def call(self) -> CpuCall:
        activation = "silu_gate" if self.gated else "none"
        attrs = Attrs(x_per_token=self.dtype == "i8", epilogue=activation)
        types = self.types()
        return launch(attrs, types, infer(attrs, types), KernelEnv((1, MAX_ROWS), (1, MAX_ROWS)))

    @property
    def panel_bytes(self) -> int:
        """Of the weight in panels of 64 outputs."""
        size = -(-self.n // 64) * 64 * self.k
        return size // 2 if self.dtype == "u4" else size * NUMPY_DTYPES[self.dtype].itemsize

    def rest(self) -> list[np.ndarray]:
        """What comes behind the weight: a scale an output, or those of groups and their zero points, in panels."""
        if self.dtype != "u4":
            return [aligned(np.ones(self.n, np.float32))]
        numbers = -(-self.n // 64) * 64 * groups(self.k)
        return [aligned(np.ones(numbers, np.float16)), aligned(np.full(numbers // 2, 0x88, np.uint8))]


CASES = [
    Case("qkv", 576, 960, "f8e4m3"),
    Case("o", 576, 576, "f8e4m3"),
    Case("gate_up", 576, 3072, "f8e4m3", gated=True),
    Case("down", 1536, 576, "f8e4m3"),
    Case("head", 576, 49152, "f8e4m3"),
    Case("qkv", 576, 960, "i8"),
    Case("gate_up", 576, 3072, "i8", gated=True),
    Case("down", 1536, 576, "i8"),
    Case("qkv", 576, 960, "bf16"),
    Case("gate_up", 576, 3072, "bf16", gated=True),
    Case("down", 1536, 576, "bf16"),
    Case("head", 576, 49152, "bf16"),
    Case("qkv", 576, 960, "u4"),
    Case("gate_up", 576, 3072, "u4", gated=True),
    Case("down", 1536, 576, "u4"),
    Case("gate_up", 576, 3072, "f32", gated=True),
]


def times(library: Library, index: int, inputs: list[np.ndarray], outputs: list[np.ndarray], **options: int) -> float:
    """Seconds of one of `repeat` runs, the tenth percentile of three passes: a machine is seldom quiet."""
    passes = []
    for _ in range(3):
        seconds = np.zeros(options["repeat"])
        library.run(index, inputs, outputs, seconds=seconds.ctypes.data, **options)
        passes.append(seconds)
    return float(np.quantile(np.concatenate(passes), 0.1))


def limits(library: Library, threads: int) -> tuple[float, float]:
    """GB/s of plain reads and GFLOP/s of multiply-adds."""
    x, y = aligned(np.ones(COLD_BYTES // 4, np.float32)), aligned(np.zeros(16 * threads, np.float32))
    part, count = 2 << 20, 100_000

    def time_of(index: int, tokens: int) -> float:
        return times(
            library, index, [y, x], [y], threads=threads, tokens=tokens, repeat=COLD_BYTES // part, advance=part
        )

    read, flops = time_of(len(CASES), part // 4), time_of(len(CASES) + 1, count)
    return part / read / 1e9, threads * count * 12 * 32 / flops / 1e9


def measure(library: Library, index: int, rows: int, threads: int) -> float:
    """Seconds of one launch, weights not in any cache."""
    case = CASES[index]
    size = case.panel_bytes
    copies = max(1, min(COLD_BYTES // size, 256 if rows == 1 else 8))
    rng = np.random.default_rng(0)
    some = (64 * rng.standard_normal(1 << 20, np.float32)).astype(ml_dtypes.float8_e4m3fn)  # few are below 2^-6
    dtype = np.dtype(np.uint8) if case.dtype == "u4" else NUMPY_DTYPES[case.dtype]
    w = aligned(np.resize(some, size * copies // dtype.itemsize).astype(dtype))
    # Small, so that results are as in a model: exponentials of huge ones are slow.
    x = aligned(0.001 * rng.standard_normal((rows, case.k), np.float32))
    y = aligned(np.zeros((rows, case.n // (1 + case.gated)), np.float32))
    return times(library, index, [x, w, *case.rest()], [y], threads=threads, tokens=rows, repeat=copies, advance=size)


def main() -> None:
    """Prints a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=ISAS[-1], choices=[*ISAS, *BF16_ISAS])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,4,8,16,64,512")
    parser.add_argument("--only", default="", help="a name or dtype, or a part of one")
    options = parser.parse_args()
    calls = [case.call() for case in CASES]
    width = Product(("T",))
    header = "plugins/cpu/functions.h"
    calls.append(CpuCall(header, "read_all", (Pointer("in", 1), width, Pointer("out", 0)), prelude=LIMITS))
    calls.append(CpuCall(header, "multiply", (width, Pointer("out", 0)), prelude=LIMITS))
    types = [{Pointer("in", i): kind.dtype for i, kind in enumerate(case.types())} for case in CASES] + [{}, {}]
    library = Library(calls, options.isa, types)
    for threads in map(int, options.threads.split(",")):
        read, flops = limits(library, threads)
        print(f"{options.isa}, {threads} threads: reads {read:.1f} GB/s, multiply-adds {flops:.0f} GFLOP/s")
        for index, case in enumerate(CASES):
            if options.only not in f"{case.name} {case.dtype}":
                continue
            line = f"  {case.name:8} {case.dtype:7} {case.k:5}x{case.n:<6}"
            for rows in map(int, options.rows.split(",")):
                seconds = measure(library, index, rows, threads)
                speed = f"{case.panel_bytes / seconds / 1e9:5.1f} GB/s" if rows == 1 else ""
                line += f" | {rows:3}: {speed}{2 * rows * case.k * case.n / seconds / 1e9:6.1f} GF/s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
