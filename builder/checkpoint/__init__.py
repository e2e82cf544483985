"""Checkpoints: a Hugging Face directory or a GGUF file, opened without reading a weight.

Comes in: a path. Goes out: a `Checkpoint` (config, tokenizer, lazy tensors by Hugging Face names, pin). Must not know:
graphs, precision, targets.
"""

from llmc.builder.checkpoint.checkpoint import Checkpoint, TensorInfo
from llmc.builder.checkpoint.opening import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
