"""The table that `llmc run --table` prints: what was built, and how fast it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan


def print_table(plan: Plan, numbers: Mapping[str, float | None], build_report: Path | None) -> None:
    """Prints to stdout. `numbers`: `load_seconds` and `tokens_per_second`; `build_report` has the stages' seconds."""
    table = Table(show_header=False, box=None)
    if build_report is not None:
        for stage, seconds in _stages(build_report).items():
            table.add_row(f"build: {stage}", f"{seconds:.1f} s")
    build = plan.manifest.build
    launches = max(rank.launches_per_layer for rank in plan.manifest.ranks)
    table.add_row("plan size", f"{plan.path.stat().st_size / 1e6:.1f} MB")
    table.add_row("launches a layer, traced", f"{build.launches_eager_per_layer:.1f}")
    table.add_row("launches a layer, compiled", f"{launches:.1f}")
    table.add_row("load", f"{numbers['load_seconds']:.2f} s")
    rate = numbers["tokens_per_second"]
    table.add_row("decode", "answer too short to tell" if rate is None else f"{rate:.1f} tokens/s")
    Console().print(table)


def _stages(path: Path) -> dict[str, float]:
    try:
        seconds = json.loads(path.read_text())["seconds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--build-report {path}: is not what `llmc build --report` writes: {error}") from error
    return {str(name): float(value) for name, value in seconds.items()}
