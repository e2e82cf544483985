"""What a build says of itself when it is done: the numbers that `llmc build` prints and writes.

Comes in: measurements of `compile_plan`. Goes out: `BuildReport`. Must not know: how to print. Times and memory stand
here and not in the plan, whose bytes must not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.builder.memory import MemoryPlan


@dataclass(frozen=True)
class BuildReport:
    """`published` False: the gate refused the plan, and it stands nowhere. `seconds` by stage, in order.
    `peak_memory_bytes`: the most that this process held at once. Not g++: Linux counts what the parent held before exec
    as its child's. `launches_traced`: kernels a layer that an eager runner launches in a step; `launches_compiled`: of
    the rank that launches most. `launches_generic`: launches of a step in code for what no fused pattern claims, by
    operator. `quality`: what asking the finished engine gave, if it was. `parity`: how much of text handling was
    compared with transformers'. `notes`: what the user should know of how this engine serves. `reused`: stages whose
    result an earlier build had made. `unchanged`: the plan already was this build, whose report this is; the seconds
    are those of finding out.
    """

    plan: str
    published: bool
    digest: str
    plan_bytes: int
    seconds: dict[str, float]
    peak_memory_bytes: int
    launches_traced: float
    launches_compiled: float
    launches_step: int
    launches_generic: dict[str, int]
    memory: MemoryPlan
    quality: dict[str, Any]
    parity: str
    notes: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    unchanged: bool = False

    def rows(self) -> list[tuple[str, str]]:
        """For people: name and value."""
        times = [
            (name, f"{seconds:.1f} s{', reused' if name in self.reused else ''}")
            for name, seconds in self.seconds.items()
        ]
        return [
            ("plan", f"{self.plan} ({self.plan_bytes / 1e6:.1f} MB){self._standing()}"),
            ("digest", self.digest),
            *times,
            ("total", f"{sum(self.seconds.values()):.1f} s"),
            ("peak memory", f"{self.peak_memory_bytes / 1e6:.0f} MB, without g++"),
            ("weights", f"{self.memory.weights_bytes / 1e6:.1f} MB in {self.memory.tp} rank(s)"),
            ("KV of a token", f"{self.memory.kv_block_bytes // self.memory.block_size:,} B ({self.memory.kv_dtype})"),
            ("launches a layer", f"{self.launches_traced:.1f} as traced, {self.launches_compiled:.1f} compiled"),
            ("launches a step", f"{self.launches_step}"),
            ("of generic code", _generic(self.launches_generic)),
            ("tokenizer and chat", self.parity),
            *_quality_rows(self.quality),
            *(("note", note) for note in self.notes),
        ]

    def _standing(self) -> str:
        if self.unchanged:
            return ", unchanged"
        return "" if self.published else ", not published"


def _generic(launches: dict[str, int]) -> str:
    """What fell to generic code: an activation or a norm that no pattern knows costs launches, never support."""
    parts = ", ".join(f"{count} {op}" for op, count in launches.items())
    return f"{sum(launches.values())}{f' ({parts})' if parts else ''}"


def _quality_rows(quality: dict[str, Any]) -> list[tuple[str, str]]:
    """Perplexity with its change, then whatever else was measured by its own name."""
    rest = dict(quality)
    rows = []
    if "perplexity" in rest and "reference_perplexity" in rest:
        mine, reference, change = (
            rest.pop(name) for name in ("perplexity", "reference_perplexity", "perplexity_change")
        )
        rows.append(("perplexity", f"{mine}, Hugging Face at fp32 {reference} ({float(change):+.2%})"))
    return [*rows, *((f"quality: {name.replace('_', ' ')}", str(value)) for name, value in rest.items())]
