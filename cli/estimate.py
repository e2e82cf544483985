"""`llmc estimate`: what a model needs of a GPU and how fast it can be at most; no GPU and no weights are needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.bench import Numbers
from llmc.cli.build import PRECISIONS, chosen_precision, require_build_libraries

if TYPE_CHECKING:
    from llmc.builder.capacity.estimate import Estimate, Row

#: Figures of the summary, and what they are called there.
_SUMMARY = {
    "weights": "weights",
    "kv_token": "KV of a token",
    "kv_pool": "KV pool, a rank",
    "concurrent_tokens": "tokens at once",
    "concurrent_sequences": "sequences at once",
    "decode_ceiling": "decode ceiling, 1 sequence",
    "crossover_batch": "crossover batch",
    "prefill": "time to first token",
    "most_rate": "most requests",
    "most_tokens": "most answered",
    "latency": "latency then (Little)",
    "replicas": "replicas for --rate",
    "needed_in_flight": "in flight at --rate",
    "needed_latency": "latency at --rate (Little)",
    "break_even": "compiling pays after",
    "break_even_time": "which is decoding for",
}


@click.command(name="estimate")
@click.option("--target", required=True, help="cuda (sm_90), or cuda:sm_80 and others.")
@click.option("--gpu", help="A GPU by name, such as h200-sxm. Default: one of the target.")
@click.option(
    "--model", required=True, type=click.Path(path_type=Path), help="Checkpoint, or a folder with its config.json."
)
@click.option("--fp8", is_flag=True, help="As in `llmc build`.")
@click.option("--int8", is_flag=True, help="As in `llmc build`.")
@click.option("--int4", is_flag=True, help="As in `llmc build`.")
@click.option("--dtype", type=click.Choice(PRECISIONS), help="As in `llmc build`.")
@click.option("--kv-cache-dtype", "kv_dtype", help="As in `llmc build`.")
@click.option("--lm-head-dtype", help="As in `llmc build`.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="GPUs that share the model.")
@click.option("--profile", default="chat", show_default=True, help="Shape profile: largest step and block size.")
@click.option("--context", type=click.IntRange(min=2), help="Prompt and answer of a request. Default: 4096.")
@click.option("--answer", type=click.IntRange(min=1), help="Tokens of it that are answered. Default: 256.")
@click.option("--batch", "batches", default="", type=Numbers(), help="Decode batches to show. Default: powers of two.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests a second that are to be served.")
@click.option("--memory-use", default=0.9, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--build-minutes", default=10.0, show_default=True, type=click.FloatRange(0), help="A build takes.")
@click.option("--eager-launch-us", default=5.0, show_default=True, type=click.FloatRange(0), help="Without compiling.")
@click.option("--graph-launch-us", default=1.0, show_default=True, type=click.FloatRange(0), help="Inside a graph.")
@click.option("--explain", is_flag=True, help="Print every formula with its numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --explain also the formulas.")
def command(
    target: str,
    model: Path,
    fp8: bool,
    int8: bool,
    int4: bool,
    dtype: str | None,
    batches: tuple[int, ...],
    rate: float | None,
    memory_use: float,
    build_minutes: float,
    eager_launch_us: float,
    graph_launch_us: float,
    explain: bool,
    as_json: bool,
    **rest: Any,
) -> None:
    """Memory, concurrency and roofline bounds of a model on a GPU: least times, most rates."""
    precision = chosen_precision({"fp8": fp8, "int8": int8, "int4": int4, "dtype": dtype})
    require_build_libraries()
    from llmc.builder.capacity.estimate import Workload
    from llmc.estimate import estimate_model

    workload = Workload(
        0, 0, batches, rate, memory_use, 60 * build_minutes, eager_launch_us * 1e-6, graph_launch_us * 1e-6
    )
    found = estimate_model(model, target, precision=precision, workload=workload, **rest)
    if as_json:
        click.echo(json.dumps(as_data(found, explain), indent=2))
    else:
        _print(found)
        if explain:
            click.echo()
            for quantity in found.sheet.quantities.values():
                click.echo(quantity.explain())


def as_data(found: Estimate, explain: bool) -> dict[str, object]:
    """The estimate as JSON has it; what is unbounded is null."""
    from math import isfinite

    figures: dict[str, object] = {}
    for name, quantity in found.sheet.quantities.items():
        value = quantity.value if isfinite(quantity.value) else None
        entry = {"value": value, "unit": quantity.unit, "formula": quantity.formula, "note": quantity.note}
        figures[name] = entry if explain else value
    return {
        "model": found.model.name,
        "precision": found.model.precision,
        "kv_dtype": found.model.kv_dtype,
        "gpu": found.gpu.name,
        "tp": len(found.model.ranks),
        "figures": figures,
        "decode": [_row(row, "batch") for row in found.decode],
        "prefill": [_row(row, "tokens") for row in found.prefill],
    }


def _row(row: Row, size: str) -> dict[str, object]:
    bound = row.bound
    return {
        size: row.size,
        "seconds": row.seconds,
        "tokens_per_second": row.rate,
        "bound": bound.by,
        "weights_bytes": bound.weights,
        "kv_bytes": bound.kv,
        "flops": dict(bound.flops),
        "link_seconds": bound.link_seconds,
    }


def _print(found: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    from llmc.builder.capacity.sheet import formatted

    console, model = Console(), found.model
    gpus = f"{len(model.ranks)} x {found.gpu.name}" if len(model.ranks) > 1 else found.gpu.name
    work = found.workload
    console.print(
        f"{model.name}, {model.precision}, KV cache {model.kv_dtype}, on {gpus}; requests of {work.prompt} tokens, "
        f"answers of {work.answer}. All times are least times.",
        highlight=False,
    )
    table = Table(show_header=False, box=None)
    for name, title in _SUMMARY.items():
        if (quantity := found.sheet.quantities.get(name)) is not None:
            table.add_row(title, formatted(quantity.value, quantity.unit))
    console.print(table)
    for title, rows in (("decode batch", found.decode), ("prefill tokens", found.prefill)):
        table = Table(title, "time", "tokens/s", "a sequence", "bound by", box=None, title_justify="left")
        for row in rows:
            each = formatted(1 / row.seconds, "tokens/s") if title == "decode batch" else ""
            table.add_row(f"{row.size:,}", formatted(row.seconds, "s"), f"{row.rate:,.0f}", each, row.bound.by)
        console.print(table)
