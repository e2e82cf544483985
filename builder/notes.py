"""What the user should know of how an engine serves: lengths that only the profile limits, whose scales it has.

Comes in: a checkpoint, its memory arithmetic, the recorded build. Goes out: sentences. Must not know: how they are
printed.
"""

from __future__ import annotations

from llmc.artifacts.calibration import WEIGHTS
from llmc.artifacts.schema import BuildInfo
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.memory import MemoryPlan


def build_notes(checkpoint: Checkpoint, traced: str | None, memory: MemoryPlan, build: BuildInfo) -> tuple[str, ...]:
    """`traced`: what tracing has to say, if anything."""
    return (*filter(None, (traced, _length(checkpoint, memory))), *_quantized(checkpoint, build))


def _length(checkpoint: Checkpoint, memory: MemoryPlan) -> str:
    """What to know of `max_seq_len` where only the profile limits sequences; empty otherwise."""
    if checkpoint.longest is not None:
        return ""
    return (
        f"nothing in the checkpoint limits a sequence: this engine takes {memory.max_seq_len} tokens, "
        "a profile with another max_seq_len fewer or more"
    )


def _quantized(checkpoint: Checkpoint, build: BuildInfo) -> list[str]:
    """Whose scales the engine has, and what of the checkpoint's own quantization it has not."""
    own = checkpoint.quantization
    names = {f"{weights}_scales": f"{weights.upper()} scales" for weights in WEIGHTS}
    names["kv_scales"] = "scales of keys and values"
    named = {what: build.config.get(key) for key, what in names.items()}
    return [
        *(f"{what} are {whose}" for what, whose in named.items() if whose),
        *(own.notes(build.precision) if own else ()),
        *(own.cache_notes(build.kv_dtype) if own else ()),
    ]
