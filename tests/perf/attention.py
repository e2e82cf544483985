"""Measures paged_attention: decode at a long context against plain reads, prefill against the rate of multiply-adds.

    python -m tests.perf.attention [--threads 1 2] [--isa x86-64-v3 x86-64-amx] [--repeat 20]

The best of the repetitions is printed: other work on the machine only adds to a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.plugins.cpu.call import CpuCall, KernelEnv, Pointer, Product
from llmc.plugins.paged_attention import Attrs, infer
from llmc.plugins.paged_attention import cpu as paged_cpu
from llmc.profiles import load_cpu_target
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.native_step import Launch, Rank, Step, build, source

_READ = """
#include "plugins/cpu/lanes.h"
namespace llmc {
inline void read_all(const Ctx& c, int tid, const float* x, float* out, int64_t n) {
  const Share own = share(n / 64, tid, c.threads);
  Lanes total[4] = {splat(0), splat(0), splat(0), splat(0)};
  for (int64_t i = own.first; i < own.last; ++i)
    for (int j = 0; j < 4; ++j) total[j] = total[j] + load(x + i * 64 + j * 16);
  out[tid * 16] = sum(total[0] + total[1] + total[2] + total[3]);
}
}
"""


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    context: int
    tokens: int
    block_size: int = 16

    def kv_bytes(self) -> int:
        """Of the context, keys and values."""
        return (
            paged_cpu.layer_bytes(self.kv_heads, self.head_dim, self.head_dim, self.block_size, self.kv_dtype)
            * self.context
            // self.block_size
        )

    def flops(self) -> int:
        """Of scores and values, for the keys that each query sees."""
        seen = sum(range(self.context - self.tokens + 1, self.context + 1))
        return 4 * seen * self.heads * self.head_dim

    def launch(self, tiles: bool) -> Launch:
        size = paged_cpu.layer_bytes(self.kv_heads, self.head_dim, self.head_dim, self.block_size, self.kv_dtype)
        env = KernelEnv(
            (1, 4096), (1, 64), 1, self.block_size, self.kv_dtype, size, {0: 0}, 64, self.context,
            tiles=tiles,
        )  # fmt: skip
        scales = ((0.25,) * self.kv_heads, (0.5,) * self.kv_heads) if self.kv_dtype == "f8e4m3" else None
        attrs = Attrs(0, self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, kv_scales=scales)
        inputs = (TensorType("f32", ("T", self.heads, self.head_dim)),)
        return Launch(paged_cpu.launch(attrs, inputs, infer(attrs, inputs), env), inputs, infer(attrs, inputs))


SHAPES = [
    *(Shape(f"decode 1x8192, {h} heads on {k}, {d}", h, k, d, "bf16", 8192, 1) for h, k, d in ((3, 1, 64), (9, 3, 64))),
    Shape("decode 1x8192, 9 heads on 3, 64", 9, 3, 64, "f32", 8192, 1),
    Shape("decode 1x8192, 32 heads on 8, 128", 32, 8, 128, "bf16", 8192, 1),
    *(
        Shape(f"decode 1x8192, {h} heads on {k}, {d}", h, k, d, "f8e4m3", 8192, 1)
        for h, k, d in ((9, 3, 64), (32, 8, 128))
    ),
    Shape("decode 1x512, 9 heads on 3, 64", 9, 3, 64, "bf16", 512, 1),
    Shape("prefill 512, 9 heads on 3, 64", 9, 3, 64, "bf16", 512, 512),
    Shape("prefill 512, 9 heads on 3, 64", 9, 3, 64, "f32", 512, 512),
    Shape("prefill 512 of 8192, 9 heads on 3, 64", 9, 3, 64, "bf16", 8192, 512),
    Shape("prefill 512 of 8192, 9 heads on 3, 64", 9, 3, 64, "f8e4m3", 8192, 512),
    Shape("prefill 512, 32 heads on 8, 128", 32, 8, 128, "bf16", 512, 512),
]


def best(rank: Rank, repeat: int, run: Callable[[int], None]) -> float:
    """Seconds of the launch itself, as between two others of a step: neither the way from Python nor waking threads."""
    times = []
    for i in range(repeat):
        run(i)
        times.append(rank.took())
    return min(times)


def measure_reads(launches: list[Launch], isa: str, threads: int, repeat: int) -> float:
    """Bytes a second of summing 256 MB."""
    x, out = aligned(np.zeros(2**28, np.uint8)).view(np.float32), np.zeros(16 * 64, np.float32)
    x[:] = 1  # pages that were never written would all be the one page of zeros
    rank = Rank(build(source(launches), (isa,))[isa], launches, threads)
    step = Step(np.array([0, x.size], np.int32), np.array([1], np.int32), np.zeros((1, 1), np.int32))
    seconds = best(rank, repeat, lambda _: rank.call(len(launches) - 1, step, [x], [out]) and None)
    rank.close()
    return x.nbytes / seconds


def measure(shape: Shape, index: int, launches: list[Launch], isa: str, threads: int, repeat: int) -> float:
    """Seconds of the shape's launch. Enough copies of the cache are visited in turn that a decode reads memory, not
    caches.
    """
    rng = np.random.default_rng(0)
    blocks = shape.context // shape.block_size
    copies = max(1, 2**28 // shape.kv_bytes()) if shape.tokens == 1 else 1
    kv = aligned(np.zeros(shape.kv_bytes() * copies, np.uint8))
    kv.view(NUMPY_DTYPES[shape.kv_dtype])[:] = 1
    tables = rng.permutation(blocks * copies).astype(np.int32).reshape(copies, 1, blocks)
    q = rng.standard_normal((shape.tokens, shape.heads, shape.head_dim)).astype(np.float32)
    out = np.zeros((shape.tokens, shape.heads * shape.head_dim), np.float32)
    rank = Rank(build(source(launches), (isa,))[isa], launches, threads, kv)
    starts, context = np.array([0, shape.tokens], np.int32), np.array([shape.context], np.int32)
    seconds = best(
        rank,
        max(repeat, min(copies, 50)),
        lambda i: rank.call(index, Step(starts, context, tables[i % copies]), [q], [out]) and None,
    )
    rank.close()
    return seconds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=list(ISAS))
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    x, size = TensorType("f32", ("T",)), TensorType("f32", (1024,))
    read = CpuCall("plugins/cpu/runtime.h", "read_all", (Pointer("in", 0), Pointer("out", 0), Product(("T",))), _READ)
    for isa in options.isa:
        tiles = load_cpu_target(f"cpu:{isa}").tiles
        launches = [*(shape.launch(tiles) for shape in SHAPES), Launch(read, (x,), (size,))]
        for threads in options.threads:
            reads = measure_reads(launches, isa, threads, options.repeat)
            print(f"{isa}, {threads} threads: reads {reads / 1e9:.1f} GB/s")
            for index, shape in enumerate(SHAPES):
                seconds = measure(shape, index, launches, isa, threads, options.repeat)
                rate = (
                    f"{shape.kv_bytes() / seconds / 1e9:6.1f} GB/s {shape.kv_bytes() / seconds / reads:5.0%} of reads"
                )
                work = f"{shape.flops() / seconds / 1e9:6.1f} GFLOP/s"
                name = f"{shape.name}, {shape.kv_dtype}"
                print(f"  {name:44} {seconds * 1e6:9.0f} us  {work}  {rate if shape.tokens == 1 else ''}")


if __name__ == "__main__":
    main()
