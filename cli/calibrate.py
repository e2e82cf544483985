"""`llmc calibrate`: measure a checkpoint's ranges once, reuse the table in many builds."""

from __future__ import annotations

from pathlib import Path

import click

from llmc.artifacts.calibration import ACTIVATIONS


@click.command(name="calibrate")
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Hugging Face folder, or a GGUF file.")
@click.option("-o", "--output", default="calibration.json", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    help="Text: .txt, .jsonl or a folder. Default: documentation of Python's standard library.",
)
@click.option("--samples", type=click.IntRange(min=1), help="Sequences to run. Default: 16, or what memory allows.")
@click.option("--tokens", type=click.IntRange(min=2), help="Tokens of each. Default: 256, or what the model takes.")
@click.option("--seed", default=0, show_default=True, type=int, help="Which samples are drawn.")
@click.option("--fp8-activations", default="none", show_default=True, type=click.Choice(ACTIVATIONS))
@click.option(
    "--fp8-budget",
    default=1.10,
    show_default=True,
    type=click.FloatRange(1, 2),
    help="Layers that lose most stay bf16, up to so many times the bytes of pure FP8.",
)
def command(
    model: Path,
    output: Path,
    calib: Path | None,
    samples: int | None,
    tokens: int | None,
    seed: int,
    fp8_activations: str,
    fp8_budget: float,
) -> None:
    """Round a checkpoint's weights to FP8: a table, and beside it the weights, for `llmc build --fp8 --calib TABLE`."""
    from llmc.artifacts.errors import UsageError
    from llmc.cli.build import require_build_libraries

    if output.suffix != ".json":
        raise UsageError(f"--output {output}: a calibration table is a .json file; its weights stand beside it")
    require_build_libraries()
    from llmc.artifacts.files import require_writable
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.calibration import CalibrationOptions, calibrate
    from llmc.cli.progress import make_progress

    require_writable(output)
    options = CalibrationOptions(calib, samples, tokens, seed, fp8_activations, fp8_budget)
    with make_progress() as progress, progress.stage("calibrate"):

        def advance(_: str, done: int, total: int) -> None:
            progress.advanced("calibrate", done, total)

        table = calibrate(open_checkpoint(model), options, output, advance)
    kept = sum(ranges.choice is not None and ranges.choice.kept for ranges in table.tensors.values())
    data = table.data
    click.echo(
        f"{output}: {len(table.tensors)} linears, {kept} kept in bf16, {data.samples} samples, {data.tokens} tokens"
    )
