"""From a checkpoint's config to a graph of primitives: torch.export of the stock transformers model, without weights.

Comes in: a `Checkpoint`. Goes out: `Traced`. Must not know: passes, targets, any model family.
"""

from llmc.builder.trace.tracer import Traced, trace, trace_model

__all__ = ["Traced", "trace", "trace_model"]
