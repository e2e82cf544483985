"""The limits of this machine: how fast it reads memory and multiplies, by the number of threads.

Comes in: an engine's library, which has both measurements in it. Goes out: `Limits`. Must not know: models, plans.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.machine import available_memory
from llmc.plugins.cpu.products import Products
from llmc.runtime.native import HostLibrary

#: Bytes that are read: far more than caches hold.
_LEAST_BYTES = 256 << 20
_CACHES = 4  # times the largest cache
_ROUNDS = 4_000_000  # of multiply-adds: some ten milliseconds


@dataclass(frozen=True)
class Rates:
    """What so many threads reach together: bytes read a second, and operations a second by how they multiply."""

    threads: int
    reads: float
    flops: Mapping[Products, float]

    def part(self, parts: int) -> Rates:
        """What one of so many equal parts of the threads reaches beside the others."""
        return Rates(self.threads // parts, self.reads / parts, {k: rate / parts for k, rate in self.flops.items()})

    @property
    def multiplies(self) -> str:
        """The operations for people."""
        return ", ".join(f"{rate / 1e9:,.0f} GFLOP/s ({kind.label})" for kind, rate in self.flops.items())

    def data(self) -> dict[str, Any]:
        """As plain values."""
        flops = {kind.label: rate for kind, rate in self.flops.items()}
        return {"threads": self.threads, "reads": self.reads, "flops": flops}


@dataclass
class Limits:
    """Measured again in every round of a run, between the systems: a busy machine has lower limits for all alike.
    `products`: those that the works multiply with.
    """

    library: HostLibrary
    threads: int
    products: Sequence[Products]
    _seen: dict[int, list[Rates]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = min(max(_LEAST_BYTES, _CACHES * _largest_cache()), max(available_memory() // 4, 1 << 20))
        raw = np.ones(size + 64, np.uint8)  # written: pages of zeros would all be one
        start = -raw.ctypes.data % 64
        self._data = raw[start : start + size]

    def measure(self) -> None:
        """One more measurement, of one thread and of all."""
        for threads in dict.fromkeys((1, self.threads)):
            reads = self.library.read_rate(self._data, threads)
            flops = {kind: self.library.product_rate(kind, _ROUNDS, threads) for kind in self.products}
            self._seen.setdefault(threads, []).append(Rates(threads, reads, flops))

    def rates(self) -> list[Rates]:
        """The medians, of one thread and of all."""
        median = statistics.median
        return [
            Rates(n, median(r.reads for r in s), {kind: median(r.flops[kind] for r in s) for kind in self.products})
            for n, s in self._seen.items()
        ]

    @property
    def all(self) -> Rates:
        """Of all threads."""
        return self.rates()[-1]


def _largest_cache() -> int:
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)


def cpu_name() -> str:
    """As the processor calls itself."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Memory:
    """Of the processes that compute, together. `held` now: what they share with others counts in equal parts (Pss).
    `peak`, ever since each began: what each had in memory at most (VmHWM), shared pages counted in each.
    """

    held: int
    peak: int

    @staticmethod
    def of(pids: Iterable[int]) -> Memory:
        """Of these processes."""
        pids = list(pids)
        held = sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in pids)
        return Memory(held, sum(_field(Path(f"/proc/{pid}/status"), "VmHWM") for pid in pids))

    def most(self, other: Memory) -> Memory:
        """The larger of both, each by itself."""
        return Memory(max(self.held, other.held), max(self.peak, other.peak))

    def __str__(self) -> str:
        return f"{self.peak / 1e6:,.0f} MB at the peak, {self.held / 1e6:,.0f} MB held between rounds"


def _field(path: Path, name: str) -> int:
    """Bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{path} has no {name}")
