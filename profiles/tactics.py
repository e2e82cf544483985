"""Tactics: how the kernels of a target cut their work. They change speed, never a result.

Comes in: a mapping, of a target's description or of a file that `llmc tune` wrote. Goes out: `Tactics`, and what the
C++ compiler is told of it. Must not know: kernels, beyond the names of the numbers.

    packed_rows: 8         # rows up to which a linear reads packed weights again for each tile, and unpacks none
    block: 256             # of a panel that many k are unpacked to floats at once
    chunk_rows: 240        # rows whose sums a thread holds at once
    prefetch_bytes: 2048   # how far ahead packed weights are fetched: hardware stops at the end of a page
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from llmc.profiles.reading import Fields

#: What each may be. The largest block and chunk_rows together are what kernels have scratch for (THREAD_FLOATS).
CHOICES: Mapping[str, tuple[int, ...]] = {
    "packed_rows": (4, 8, 12, 16, 24, 32),
    "block": (64, 128, 256, 512),
    "chunk_rows": (60, 120, 240, 480, 512),
    "prefetch_bytes": (512, 1024, 2048, 4096, 8192),
}


@dataclass(frozen=True)
class Tactics:
    """See above; each is one of its CHOICES."""

    packed_rows: int
    block: int
    chunk_rows: int
    prefetch_bytes: int

    @staticmethod
    def of(value: object, where: str) -> Tactics:
        """Raises UsageError naming `where`, the field and what it may be."""
        fields = Fields.of(value, where, tuple(CHOICES))
        for key, choices in CHOICES.items():
            if fields.integer(key) not in choices:
                raise fields.fail(key, f"one of {', '.join(map(str, choices))} is needed")
        return Tactics(**{key: fields.integer(key) for key in CHOICES})

    @staticmethod
    def read(path: Path) -> Tactics:
        """Those of a file. Raises UsageError where it cannot be read, or as `of` does."""
        return Tactics.of(Fields.read(path, tuple(CHOICES)).values, str(path))

    @property
    def cxx_flags(self) -> tuple[str, ...]:
        """How kernels are told (plugins/linear/tiles.h)."""
        return tuple(f"-DLLMC_{key.upper()}={value}" for key, value in dataclasses.asdict(self).items())

    def to_yaml(self) -> str:
        """As `read` takes it."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)
