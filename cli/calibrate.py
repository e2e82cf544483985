"""`llmc calibrate`: measure a checkpoint's ranges once, reuse the table in many builds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from llmc.artifacts.calibration import ACTIVATIONS, LM_HEAD_DTYPES


@click.command(name="calibrate")
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Hugging Face folder, or a GGUF file.")
@click.option("-o", "--output", default="calibration.json", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    help="Text: .txt, .jsonl or a folder. Default: documentation of Python's standard library.",
)
@click.option("--int8", is_flag=True, help="Smooth and round weights to INT8, for `llmc build --int8`.")
@click.option("--int4", is_flag=True, help="Round weights to INT4 in groups of 128, for `llmc build --int4`.")
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
@click.option(
    "--lm-head-dtype",
    default="fp8",
    show_default=True,
    type=click.Choice(LM_HEAD_DTYPES),
    help="fp8: round the output head too.",
)
def command(
    model: Path,
    output: Path,
    calib: Path | None,
    int8: bool,
    int4: bool,
    samples: int | None,
    tokens: int | None,
    seed: int,
    fp8_activations: str,
    fp8_budget: float,
    lm_head_dtype: str,
) -> None:
    """Round a checkpoint's weights to FP8, INT8 or INT4: a table for `llmc build --calib`, beside it the weights."""
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
    if int8 and int4:
        raise UsageError("--int8 and --int4 exclude one another: each says what weights are rounded to; drop one")
    if int8 or int4:
        weights = "int8" if int8 else "int4"
        _refuse_fp8_options(weights)
        options = replace(CalibrationOptions.of(weights, calib), samples=samples, tokens=tokens, seed=seed)
    options = replace(options, lm_head_dtype=lm_head_dtype)
    with make_progress() as progress, progress.stage("calibrate"):

        def advance(_: str, done: int, total: int) -> None:
            progress.advanced("calibrate", done, total)

        table = calibrate(open_checkpoint(model), options, output, advance)
    kept = sum(ranges.choice is not None and ranges.choice.kept for ranges in table.tensors.values())
    data = table.data
    click.echo(
        f"{output}: {len(table.tensors)} linears, {kept} kept in bf16, {data.samples} samples, {data.tokens} tokens"
    )


def _refuse_fp8_options(weights: str) -> None:
    """Raises UsageError for those that were given beside --int8 or --int4."""
    from llmc.artifacts.errors import UsageError

    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name.startswith("fp8_") and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"{parameter.opts[-1]} is for FP8; drop it, or --{weights}")
