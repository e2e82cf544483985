"""`llmc export`: the fused graph of a plan or model in a format of others."""

from __future__ import annotations

from pathlib import Path

import click

from llmc.cli.build import PRECISIONS, require_build_libraries


@click.command(name="export")
@click.argument("source", metavar="PLAN|MODEL", type=click.Path(path_type=Path))
@click.option("--onnx", "as_onnx", is_flag=True, required=True, help="As ONNX, opset 21, with weights in OUTPUT.data.")
@click.option("-o", "--output", default="model.onnx", show_default=True, type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(PRECISIONS), help="Of a MODEL: how weights are stored. Default: bf16.")
@click.option("--profile", help="Of a MODEL: the shape profile, for the size of KV blocks. Default: chat.")
def command(source: Path, as_onnx: bool, output: Path, dtype: str | None, profile: str | None) -> None:
    """Write the fused graph of PLAN, or of MODEL (a checkpoint), and its weights.

    FP8 layers are Q/DQ; a PLAN brings its own precision, rounded and calibrated. Attention over the paged cache is made
    of operators of the domain `llmc`, which take the cache's blocks and the step's block tables as inputs; everything
    else of standard operators.
    """
    require_build_libraries()
    from llmc.export import export_onnx

    made = export_onnx(source, output, dtype=dtype, profile=profile)
    click.echo(f"{made.model}: {made.nodes} nodes; {made.weights}: {made.weights_bytes / 1e6:,.1f} MB of weights")
