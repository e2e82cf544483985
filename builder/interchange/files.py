"""Names of the files of a model that several ranks share. Comes in: a path. Goes out: paths. Must not know: formats."""

from __future__ import annotations

from pathlib import Path


def rank_path(path: Path, rank: int, tp: int) -> Path:
    """Where a rank's file stands: at `path` itself where there is one rank, else model.rank0.onnx of model.onnx."""
    return path if tp == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
