"""`llmc opt`: passes run alone on the text of a graph, as `llmc build --dump` writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmc.builder.pipeline import CompileOptions, Stage


@click.command(name="opt")
@click.argument("graphs", nargs=-1, type=click.File("r"))
@click.option("--passes", help="Names of passes, joined by commas, in the order in which they run.")
@click.option("--list", "as_list", is_flag=True, help="List the passes in the order of a build, and what each does.")
@click.option(
    "--precision", default="bf16", show_default=True, help="What quantize stores: fp32, bf16, fp8, int8 or int4."
)
@click.option(
    "--fp8-activations",
    default="none",
    show_default=True,
    help="token, static (needs --calib) or none: of quantize, fp8.",
)
@click.option("--calib", type=click.Path(path_type=Path), help="Calibration table (.json), for quantize.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Ranks that shard makes.")
@click.option("--verify", is_flag=True, help="Check every pass with the interpreter; on random weights, or --model's.")
@click.option("--model", type=click.Path(path_type=Path), help="With --verify: the checkpoint whose weights are used.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the result. Default: standard output.")
def command(graphs: tuple[Any, ...], passes: str | None, as_list: bool, verify: bool, model: Path | None,
            output: Path | None, **rest: Any) -> None:  # fmt: skip
    """Run passes on GRAPHS: files of IR text, one for each rank, or standard input.

    Several graphs, as shard makes them, are written one after the other and are read back alike.
    """
    from llmc.artifacts.errors import UsageError

    options = _options(**rest)
    if as_list:
        _print_list(options)
        return
    if not passes:
        raise UsageError("--passes names no pass; --list shows them all")
    if model is not None and not verify:
        raise UsageError(f"--model {model} is what --verify takes weights from; add --verify")
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.builder.opt import read_graphs, run_alone, weights_of

    found = [graph for file in graphs or (sys.stdin,) for graph in read_graphs(*_read(file))]
    weights = weights_of(found, open_checkpoint(model) if model is not None else None) if verify else None
    names = [name.strip() for name in passes.split(",")]
    _write(run_alone(found, names, options, weights), output)


def _options(precision: str, fp8_activations: str, calib: Path | None, tp: int) -> CompileOptions:
    from llmc.artifacts.calibration import read_table
    from llmc.builder.pipeline import CompileOptions

    table = read_table(calib) if calib is not None else None
    return CompileOptions(precision=precision, tp=tp, table=table, fp8_activations=fp8_activations)


def _read(file: Any) -> tuple[str, str]:
    from llmc.artifacts.errors import UsageError

    try:
        return file.read(), file.name
    except UnicodeDecodeError as error:
        raise UsageError(f"{file.name}: is no text: {error}") from error


def _print_list(options: CompileOptions) -> None:
    from rich.console import Console
    from rich.table import Table

    from llmc.builder.pipeline import by_name, pass_doc

    table = Table(show_header=False, box=None)
    for name, step in by_name(options).items():
        table.add_row(name, pass_doc(step))
    Console().print(table)


def _write(stage: Stage, output: Path | None) -> None:
    from llmc.artifacts.files import write_file
    from llmc.builder.dump import stage_files

    text = "".join(stage_files(stage).values())
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text.encode(), "--output")
