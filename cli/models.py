"""`llmc models`: which model types compile, from the record that comes with llmc, or measured anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmc.coverage import Coverage, Record


@click.command(name="models")
@click.argument("types", nargs=-1, metavar="[TYPE]...")
@click.option("--check", is_flag=True, help="Build a tiny model of each type and compare it with Hugging Face now.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Checks at once.")
@click.option("--timeout", type=float, default=300.0, show_default=True, help="Seconds that one check may take.")
@click.option("--record", type=click.Path(path_type=Path), help="File that --check adds its results to.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--summary", is_flag=True, help="Print the counts and the types that work, in Markdown.")
def command(
    types: tuple[str, ...],
    check: bool,
    workers: int,
    timeout: float,
    record: Path | None,
    as_json: bool,
    summary: bool,
) -> None:
    """Show which model types of transformers compile, and why the others do not; all, or those of TYPE."""
    import dataclasses
    import json

    from llmc.artifacts.errors import UsageError
    from llmc.coverage import Record

    if record is not None and not check:
        raise UsageError(f"--record {record}: only --check has results to add; add it or drop --record")
    known = Record.read(record) if record is not None and record.exists() else Record.read()
    if check:
        known = _measured(known, types, workers, timeout, record)
    rows = known.select(types)
    if as_json:
        data = {"transformers": known.transformers, "models": [dataclasses.asdict(row) for row in rows]}
        click.echo(json.dumps(data, indent=1))
    elif summary:
        click.echo(known.summary(), nl=False)
    else:
        _print(known, rows)


def _measured(known: Record, types: Sequence[str], workers: int, timeout: float, path: Path | None) -> Record:
    """The record with these types (all, without types) measured now; each result goes to stderr, and the record so far
    to `path`, as it comes.
    """
    from importlib.metadata import version

    from llmc.artifacts.errors import EnvironmentFault, UsageError
    from llmc.coverage import check_families, model_types

    try:
        every = model_types()
    except ModuleNotFoundError as error:
        raise EnvironmentFault(f"--check needs {error.name}: pip install 'llmc[build]'") from error
    if unknown := [name for name in types if name not in every]:
        raise UsageError(
            f"{unknown[0]!r} is no model type of transformers {version('transformers')}'s causal-LM mapping"
        )

    def done(row: Coverage) -> None:
        nonlocal known
        known = known.updated([row], version("transformers"))
        if path is not None:
            known.write(path)
        click.echo(f"{row.model_type}: {row.status}{f': {row.reason}' if row.reason else ''}", err=True)

    check_families(types or every, workers, timeout, done)
    return known


def _print(record: Record, rows: Sequence[Coverage]) -> None:
    from llmc.coverage import STATUSES

    width = max(len(row.model_type) for row in rows)
    for row in rows:
        launches = (
            f"{row.launches_traced:6.1f} ->{row.launches_per_layer:5.1f}"
            if row.launches_traced is not None and row.launches_per_layer is not None
            else " " * 13
        )
        click.echo(f"{row.model_type:{width}}  {row.status:8}  {launches}  {row.reason}".rstrip())
    counts = ", ".join(f"{sum(row.status == status for row in rows)} {status}" for status in STATUSES)
    click.echo(f"\ntransformers {record.transformers}; launches a layer: eager -> compiled; {counts}")
