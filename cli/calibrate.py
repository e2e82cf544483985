"""`llmc calibrate`: measure a checkpoint's ranges once, reuse the table in many builds."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="calibrate")
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Hugging Face folder, or a GGUF file.")
@click.option("-o", "--output", default="calibration.json", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--calib", type=click.Path(path_type=Path), help="Text: .txt, .jsonl or a folder. Default: the model's own."
)
@click.option("--samples", default=16, show_default=True, type=click.IntRange(min=1), help="Sequences to run.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens of each.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=int,
    help="Which samples are drawn from --calib, or what the model writes.",
)
def command(model: Path, output: Path, calib: Path | None, samples: int, tokens: int, seed: int) -> None:
    """Run text through the model and write the ranges that `llmc build --fp8 --calib TABLE` reads."""
    from llmc.cli.build import require_build_libraries

    require_build_libraries()
    from llmc.artifacts.files import require_writable, write_file
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.calibration import calibrate
    from llmc.cli.progress import make_progress

    require_writable(output)
    with make_progress() as progress, progress.stage("calibrate"):

        def advance(_: str, done: int, total: int) -> None:
            progress.advanced("calibrate", done, total)

        table = calibrate(open_checkpoint(model), calib, samples, tokens, seed, advance)
    write_file(output, table.to_json())
    click.echo(f"{output}: {len(table.tensors)} linears, {table.data.samples} samples, {table.data.tokens} tokens")
