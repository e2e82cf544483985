"""A folder whose weights are not there: its config.json says all that arithmetic needs.

Comes in: a folder. Goes out: a `Source` without tensors, of which a trace counts every parameter as stored. Must not
know: torch, transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint.directory import CONFIG, read_json
from llmc.builder.checkpoint.source import Source, TensorInfo, Texts


class ConfigSource(Source):
    """Nothing of it can be built."""

    format = "huggingface"
    num_parameters = 0

    def __init__(self, root: Path) -> None:
        self.root, self.files = root, (CONFIG,)
        self._config = read_json(root / CONFIG)
        if "quantization_config" in self._config:
            raise CheckpointError(
                f"{root / CONFIG}: has a quantization_config, whose weights cannot be told without their headers; "
                "remove the field and say --fp8, --int8 or --int4, or fetch the checkpoint"
            )
        known = str(self._config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
        self.name = known or str(self._config.get("model_type"))

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._config

    @property
    def texts(self) -> Texts:
        """None of them."""
        return Texts(b"", {}, None, {})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """None."""
        return {}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Always raises CheckpointError."""
        raise CheckpointError(f"{self.root}: has no weights: {name} cannot be read")
