"""The scales of an FP8 cache: what each layer's keys and values are divided by, and where the numbers come from.

Comes in: JSON bytes, or fields. Goes out: `KVScaleTable` and its JSON. Must not know: how scales are found or used.

    {"checkpoint": "<digest>", "source": "calibrated", "data": {...},
     "layers": {"0": [[0.0625, ...], [0.015625, ...]], ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from llmc.artifacts.calibration import CalibrationData
from llmc.artifacts.types import KVScales


@dataclass(frozen=True)
class KVScaleTable:
    """`checkpoint`: its digest. `source`: whose scales they are, in words. `data`: what was run to find them, None
    where nothing was. `layers`: layer -> scales of its keys and of its values, one each a KV head, or one for all.
    """

    checkpoint: str
    source: str
    data: CalibrationData | None
    layers: Mapping[int, KVScales]

    def to_json(self) -> bytes:
        """The same table gives the same bytes."""
        ordered = {layer: self.layers[layer] for layer in sorted(self.layers)}
        return msgspec.json.encode(KVScaleTable(self.checkpoint, self.source, self.data, ordered)) + b"\n"

    @staticmethod
    def from_json(raw: bytes) -> KVScaleTable:
        """What `to_json` wrote; raises msgspec.ValidationError for anything else."""
        return msgspec.json.decode(raw, type=KVScaleTable)
