"""How a build with an FP8 cache comes by its scales: the checkpoint's own, or calibrated and kept in the cache folder.

Comes in: the options of a build, a checkpoint. Goes out: a `KVScaleTable`, or none. Must not know: graphs, plans.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.calibration import WEIGHTS
from llmc.artifacts.errors import UsageError
from llmc.artifacts.kv_scales import KVScaleTable
from llmc.builder.cpu.cache import ObjectCache, default_folder
from llmc.builder.options import KV_CACHE_DTYPES
from llmc.builder.progress import Progress

if TYPE_CHECKING:
    from llmc.source import Source


def cache_dtype(name: str | None) -> str | None:
    """`BuildOptions.kv_dtype` of what users call it. Raises UsageError for what nobody calls so."""
    if name is not None and name not in KV_CACHE_DTYPES:
        raise UsageError(f"--kv-cache-dtype {name}: is not one of {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[name or "auto"]


def kv_table(
    source: Source, kv_dtype: str | None, calib: Path | None, progress: Progress, cache: bool = True
) -> KVScaleTable | None:
    """None unless the cache is FP8. `calib`: text to calibrate with, which a checkpoint with scales of its own does not
    need; a table of linear layers' ranges (.json) says nothing of keys and values. Raises UsageError for text that
    cannot be used, UnsupportedError for a model whose keys and values cannot be measured.
    """
    if kv_dtype != "f8e4m3":
        return None
    quantization = source.checkpoint.quantization
    data = None if calib is None or calib.suffix == ".json" else calib
    if quantization is not None and quantization.kv:
        if data is not None:
            raise UsageError(f"--calib {data}: this checkpoint brings the scales of its cache; drop --calib")
        name = f"the checkpoint's ({quantization.scheme.name})"
        return KVScaleTable(source.checkpoint.digest, name, None, quantization.kv)
    from llmc.calibration.kv_cache import kv_scales

    kept = ObjectCache(default_folder("kv_scales"), suffix=".json") if cache else None
    with progress.stage("calibrate cache"):
        table, reused = kv_scales(source.checkpoint, data, lambda: source.reference, kept)
    if reused:
        progress.reused.append("calibrate cache")
    return table


def text_for_cache_alone(precision: str, kv_dtype: str | None, calib: Path | None) -> bool:
    """Whether `calib` is for keys and values, the weights needing none. Raises UsageError for a table then."""
    if calib is None or precision in WEIGHTS or kv_dtype != "f8e4m3":
        return False
    if calib.suffix == ".json":
        raise UsageError(
            f"--calib {calib}: a table has ranges of linear layers, and only keys and values are calibrated at "
            f"{precision}; give text instead (.txt, .jsonl, a folder), or drop --calib"
        )
    return True
