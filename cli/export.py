"""`llmc export`: the fused graph of a plan or model in a format of others."""

from __future__ import annotations

from pathlib import Path

import click

from llmc.cli.build import PRECISIONS, require_build_libraries


@click.command(name="export")
@click.argument("source", metavar="PLAN|MODEL", type=click.Path(path_type=Path))
@click.option("--onnx", "form", flag_value="onnx", help="As ONNX, opset 21, with weights in OUTPUT.data.")
@click.option("--tensorrt", "form", flag_value="tensorrt", help="Of a PLAN: its steps as a TensorRT engine.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: model.onnx, or model.engine.")
@click.option("--dtype", type=click.Choice(PRECISIONS), help="Of a MODEL: how weights are stored. Default: bf16.")
@click.option("--profile", help="Of a MODEL: the shape profile, for the size of KV blocks. Default: chat.")
@click.option("--tp", type=click.IntRange(min=1), help="Of a MODEL: tensor-parallel ranks, a file each. Default: 1.")
@click.option("--sm", type=click.IntRange(min=80), help="With --tensorrt: the architecture, such as 89.")
def command(
    source: Path,
    form: str | None,
    output: Path | None,
    dtype: str | None,
    profile: str | None,
    tp: int | None,
    sm: int | None,
) -> None:
    """Write the fused graph of PLAN, or of MODEL (a checkpoint), and its weights.

    ONNX: rounded layers are Q/DQ; a PLAN brings its own precision, rounded and calibrated, and its ranks. Attention
    over the paged cache and sums over ranks are operators of the domain `llmc`, of which the first take the cache's
    blocks and the step's block tables as inputs; everything else is made of standard operators. TensorRT: keys and
    values lie in linear caches, which are inputs and outputs of the engine. Its optimization profiles are those of the
    plan's decode steps (0) and of its steps of any mixture (1). Of several ranks each has a file: model.rank0.onnx and
    so on.
    """
    from llmc.artifacts.errors import UsageError

    if form is None:
        raise UsageError("llmc export: name a format: --onnx or --tensorrt")
    given = {"--dtype": dtype, "--profile": profile, "--tp": tp} if form == "tensorrt" else {"--sm": sm}
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} {value}: is not for --{form}; drop it")
    require_build_libraries()
    from llmc.export import export_onnx, export_tensorrt

    if form == "onnx":
        for made in export_onnx(source, output or Path("model.onnx"), dtype=dtype, profile=profile, tp=tp):
            weights = f"{made.weights_bytes / 1e6:,.1f} MB of weights"
            click.echo(f"{made.model}: {made.nodes} nodes; {made.weights}: {weights}")
        return
    if sm is None:
        raise UsageError("--tensorrt needs --sm, the architecture that the engine is for, such as --sm 89")
    for path, engine in export_tensorrt(source, output or Path("model.engine"), sm):
        click.echo(f"{path}: {len(engine.engine) / 1e6:,.1f} MB for sm_{sm}, of {len(engine.layers)} layers")
