"""Where recipes read when a model is built: the checkpoint, what a calibration rounded, the traced model's constants.

Comes in: a `Checkpoint`, buffers by name, perhaps `RoundedWeights`. Goes out: arrays and shapes. Must not know:
recipes, graphs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.builder.checkpoint import Checkpoint
from llmc.builder.weights.recipe import Buffer, Leaf, StoredTensor
from llmc.builder.weights.rounded import RoundedWeights


class ModelWeights:
    """A `Source` and, for streaming, a `Shaped` one."""

    def __init__(
        self, checkpoint: Checkpoint, buffers: Mapping[str, np.ndarray], rounded: RoundedWeights | None = None
    ) -> None:
        self._checkpoint, self._buffers, self._rounded = checkpoint, buffers, rounded

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf, without reading it."""
        if isinstance(leaf, Buffer):
            return self._buffers[leaf.name].shape
        if isinstance(leaf, StoredTensor):
            return self._checkpoint.stored_shape(leaf.name) if self._rounded is None else self._rounded.shape(leaf.name)
        return tuple(self._checkpoint.tensors[self._checkpoint.resolve(leaf.name)].shape)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """A tensor, or rows start:stop of it."""
        return self._checkpoint.read(name, start, stop)

    def stored(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """A tensor as the calibration or else the checkpoint stores it, or rows of it."""
        if self._rounded is not None:
            return self._rounded.read(name, start, stop)
        first, last, _ = slice(start, stop).indices(self._checkpoint.stored_shape(name)[0])
        return self._checkpoint.stored(name, first, last)

    def buffer(self, name: str) -> np.ndarray:
        """A constant of the traced model."""
        return self._buffers[name]
