"""The scales of an FP8 cache: how large the keys and values of each layer and head get on calibration data.

Comes in: a checkpoint, its Hugging Face model, text or none. Goes out: a `KVScaleTable`, made anew or taken from the
cache folder. Must not know: the graph, plans, how a cache is laid out.

What an engine keeps of a token is what the model hands to its own cache: keys after norm and rotation, values as they
are projected. So that is where they are measured, whatever the family does before and behind.

A scale is a power of two with room for numbers `_HEADROOM` times as large as any that was seen. Room costs nothing: the
steps of E4M3 are relative to the number over 15 binades, and a power of two leaves it the digits that it would have
without a scale. What is larger still saturates.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.calibration import CalibrationData
from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.kv_scales import KVScaleTable
from llmc.artifacts.types import FP8_MAX, KVScales
from llmc.builder.checkpoint import Checkpoint
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.sources import sources_digest
from llmc.calibration.run import CalibrationOptions, calibration_samples

if TYPE_CHECKING:
    import torch

_HEADROOM = 2.0
#: With that room few tokens are enough.
_SAMPLES = 4
#: What a plan says of scales that were found here.
SOURCE = "calibrated"

#: Layer -> largest magnitude of each KV head's keys, and of its values.
Ranges = dict[int, tuple["torch.Tensor", "torch.Tensor"]]


def kv_scales(
    checkpoint: Checkpoint, data: Path | None, reference: Callable[[], Any], cache: ObjectCache | None
) -> tuple[KVScaleTable, bool]:
    """The table, and whether it was in `cache`. `data`: a .txt, a .jsonl or a folder of them, None: documentation of
    Python's standard library. `reference` gives the model at float32. Raises UsageError for data that cannot be used,
    UnsupportedError for a model that hands nothing to a cache.
    """
    options = CalibrationOptions(data=data, samples=_SAMPLES)
    samples = calibration_samples(checkpoint, options)
    parts = {
        "checkpoint": checkpoint.digest,
        "samples": samples.sha256,
        "sources": sources_digest(("artifacts", "builder", "calibration")),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    if cache is not None and (found := cache.get(key)) is not None:
        return KVScaleTable.from_json(found), True
    ranges = measure(reference(), samples.ids)
    if not ranges:
        raise UnsupportedError(
            f"{checkpoint.path}: this model keeps keys and values in no cache of transformers, so their ranges cannot "
            "be calibrated; build with --kv-cache-dtype bf16"
        )
    described = CalibrationData(samples.source, samples.sha256, len(samples.ids), samples.tokens, options.seed)
    layers = {layer: _scales(checkpoint, layer, *largest) for layer, largest in ranges.items()}
    table = KVScaleTable(checkpoint.digest, SOURCE, described, layers)
    if cache is not None:
        cache.put(key, table.to_json())
        cache.prune()
    return table, False


def measure(model: Any, samples: Sequence[Sequence[int]]) -> Ranges:
    """The largest |key| and |value| of each layer and KV head, f32[KH] each, over all tokens of the samples."""
    import torch

    longest = max(map(len, samples))
    ids = torch.zeros((len(samples), longest), dtype=torch.long)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample)] = torch.tensor(list(sample))
    real = torch.arange(longest)[None] < torch.tensor([len(sample) for sample in samples])[:, None]
    ranges: Ranges = {}

    def record(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """keys [B,KH,T,D], values [B,KH,T,DV]; padding behind the samples does not count."""
        largest = [x.abs().amax(-1).masked_fill(~real[:, None], 0).amax((0, 2)) for x in (keys, values)]
        before = ranges.get(layer, largest)
        ranges[layer] = (torch.maximum(before[0], largest[0]), torch.maximum(before[1], largest[1]))

    with torch.inference_mode(), _watched(record):
        model(ids, use_cache=True, logits_to_keep=1)
    return ranges


@contextlib.contextmanager
def _watched(record: Callable[[Any, Any, int], None]) -> Iterator[None]:
    """Inside, whatever a model gives to a cache of transformers is shown to `record` first."""
    from transformers.cache_utils import Cache

    update = Cache.update

    def recording(self: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        record(key_states, value_states, layer_idx)
        return update(self, key_states, value_states, layer_idx, *args, **kwargs)

    Cache.update = recording
    try:
        yield
    finally:
        Cache.update = update


def _scales(checkpoint: Checkpoint, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KVScales:
    for kind, largest in (("keys", keys), ("values", values)):
        if not bool(largest.isfinite().all()):
            raise CheckpointError(
                f"{checkpoint.path}: {kind} of layer {layer} are not finite on the calibration data: the weights are "
                "damaged, or the model needs more range than float32 has"
            )
    return tuple(map(scale_for, keys.tolist())), tuple(map(scale_for, values.tolist()))


def scale_for(largest: float) -> float:
    """The power of two that numbers up to `largest` are divided by; 1 where all are 0."""
    if largest == 0:
        return 1.0
    fraction, exponent = math.frexp(_HEADROOM * largest / FP8_MAX)
    return math.ldexp(1.0, max(exponent - (fraction == 0.5), -120))
