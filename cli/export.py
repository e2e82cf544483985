"""`llmc export`: the fused graph of a plan or model in a format of others."""

from __future__ import annotations

from pathlib import Path

import click

from llmc.cli.build import PRECISIONS, require_build_libraries


@click.command(name="export")
@click.argument("source", metavar="PLAN|MODEL", type=click.Path(path_type=Path))
@click.option("--onnx", "form", flag_value="onnx", help="As ONNX, opset 21, with weights in OUTPUT.data.")
@click.option("--tensorrt", "form", flag_value="tensorrt", help="Of a PLAN: its decode step as a TensorRT engine.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: model.onnx, or model.engine.")
@click.option("--dtype", type=click.Choice(PRECISIONS), help="Of a MODEL: how weights are stored. Default: bf16.")
@click.option("--profile", help="Of a MODEL: the shape profile, for the size of KV blocks. Default: chat.")
@click.option("--sm", type=click.IntRange(min=80), help="With --tensorrt: the architecture, such as 89.")
def command(
    source: Path, form: str | None, output: Path | None, dtype: str | None, profile: str | None, sm: int | None
) -> None:
    """Write the fused graph of PLAN, or of MODEL (a checkpoint), and its weights.

    ONNX: FP8 layers are Q/DQ; a PLAN brings its own precision, rounded and calibrated. Attention over the paged cache
    is made of operators of the domain `llmc`, which take the cache's blocks and the step's block tables as inputs;
    everything else of standard operators. TensorRT: keys and values lie in linear caches, which are inputs and outputs
    of the engine; its optimization profile goes up to the plan's sequences.
    """
    from llmc.artifacts.errors import UsageError

    if form is None:
        raise UsageError("llmc export: name a format: --onnx or --tensorrt")
    given = {"--dtype": dtype, "--profile": profile} if form == "tensorrt" else {"--sm": sm}
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} {value}: is not for --{form}; drop it")
    require_build_libraries()
    from llmc.export import export_onnx, export_tensorrt

    if form == "onnx":
        made = export_onnx(source, output or Path("model.onnx"), dtype=dtype, profile=profile)
        click.echo(f"{made.model}: {made.nodes} nodes; {made.weights}: {made.weights_bytes / 1e6:,.1f} MB of weights")
        return
    if sm is None:
        raise UsageError("--tensorrt needs --sm, the architecture that the engine is for, such as --sm 89")
    path = output or Path("model.engine")
    engine = export_tensorrt(source, path, sm)
    click.echo(f"{path}: {len(engine.engine) / 1e6:,.1f} MB for sm_{sm}, of {len(engine.layers)} layers")
