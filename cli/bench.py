"""`llmc bench PLAN`: how fast a plan is, as a share of this machine's limits, and beside peers in the same run.

`llmc bench serve` measures a running server instead; see llmc.cli.bench_serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmc.cli.bench_serve import command as bench_serve

if TYPE_CHECKING:
    from llmc.bench.run import OperatorTable, Report
    from llmc.bench.work import Timing, Work

_WIDTH = 120


class Numbers(click.ParamType):
    """Positive numbers, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """As a tuple; an empty text is none."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,4,16", param, ctx)
        if any(number < 1 for number in numbers):
            self.fail(f"{value!r} has a number below 1", param, ctx)
        return numbers


class _PlanByDefault(click.Group):
    """A group whose first argument may be left out: then it is `plan`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["plan", *args]
        return super().parse_args(ctx, args)


@click.group(name="bench", cls=_PlanByDefault)
def command() -> None:
    """Measure speed: `llmc bench PLAN [OPTIONS]` of a plan, `llmc bench serve` of a running server."""


command.add_command(bench_serve)


@command.command(name="plan")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--against",
    "peers",
    multiple=True,
    metavar="KIND=PATH",
    help="A peer to time in the same run, once or more: llama.cpp=FILE.gguf, "
    "openvino=FILE.gguf (both with the extra llmc[bench]), transformers=CHECKPOINT (fp32, eager), "
    "vllm=CHECKPOINT (in the Python that LLMC_VLLM_PYTHON names).",
)
@click.option("--model", type=click.Path(path_type=Path), help="The checkpoint that `--against transformers` loads.")
@click.option("--prefill", "prefills", default="512,2048", show_default=True, type=Numbers(), help="Prompt lengths.")
@click.option("--batch", "batches", default="1,4,16,64", show_default=True, type=Numbers(), help="Sequences a decode.")
@click.option(
    "--context", "contexts", default="2048,8192", show_default=True, type=Numbers(), help="Tokens before a decode."
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--decode-tokens", default=32, show_default=True, type=click.IntRange(1, 128), help="Steps of a decode.")
@click.option(
    "--mmap/--no-mmap",
    default=True,
    show_default=True,
    help="Leave weights in the plan's file, or copy them, as `serve`.",
)
@click.option("--operators/--no-operators", default=True, show_default=True, help="Time every launch, by operator.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the roofline picture into this file, FILE.svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_plan(
    plan: Path,
    peers: tuple[str, ...],
    model: Path | None,
    prefills: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    repeats: int,
    decode_tokens: int,
    mmap: bool,
    operators: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time PLAN: prompts, decodes by batch and context, load to first token, memory, operators.

    The machine's limits are measured in the same run, and every speed is also given as a share of what they allow.
    Numbers beyond the plan's profile are lowered to it.
    """
    from llmc.artifacts.errors import UsageError
    from llmc.artifacts.verify import require_verified
    from llmc.bench.peer import parse_peer
    from llmc.bench.run import run
    from llmc.bench.work import works

    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: the picture is written as SVG; name a file that ends in .svg")
    if model is not None and not any(text.startswith("transformers") for text in peers):
        raise UsageError("--model is for --against transformers: the peer loads the checkpoint")
    chosen = [parse_peer(text, model) for text in peers]
    if any(kind == "transformers" for kind, _ in chosen):
        from llmc.cli.build import require_build_libraries

        require_build_libraries()
    profile = require_verified(plan, model, sections=False).manifest.profile
    longest = profile.max_seq_len - decode_tokens
    if longest < 1:
        raise UsageError(f"--decode-tokens {decode_tokens}: the plan takes {profile.max_seq_len} in all")
    timed = works(batches, contexts, prefills, profile.max_num_seqs, longest)
    if not timed:
        raise UsageError("--prefill, --batch and --context are all empty: nothing to time")
    profiled = _profiled(timed) if operators else []
    report = run(plan, timed, chosen, repeats=repeats, steps=decode_tokens, profiled=profiled, mmap=mmap)
    if plot is not None:
        from llmc.bench.picture import draw

        plot.write_text(draw(report))
    if as_json:
        import json

        click.echo(json.dumps(report.data(), indent=2))
    else:
        _print(report)


def _profiled(timed: list[Work]) -> list[Work]:
    """A prompt and a decode, the first of each."""
    first = {work.kind: work for work in reversed(timed)}
    return [first[kind] for kind in ("prefill", "decode") if kind in first]


def _print(report: Report) -> None:
    from rich.console import Console

    console = Console()
    console.width = max(console.width, _WIDTH)  # a pipe counts as 80
    for rates in report.limits:
        console.print(
            f"{report.cpu}, {rates.threads} thread(s): reads {rates.reads / 1e9:.1f} GB/s, "
            f"multiply-adds {rates.multiplies}"
        )
    console.print()
    console.print(_works(report))
    console.print()
    for row in report.systems:
        console.print(f"{row.name}: {row.load:.2f} s to the first token; {row.memory} ({row.processes})")
    for table in report.operators:
        console.print()
        console.print(_operators(table))


def _works(report: Report) -> Any:
    from rich.table import Table

    own, *peers = (row.name for row in report.systems)
    table = Table(box=None, title="tokens a second, medians", title_justify="left", title_style="bold")
    table.add_column("work", no_wrap=True)
    table.add_column(own, justify="right")
    for column in ("spread", "of the bound", "by", "GB/s", "GFLOP/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in peers:
        for column in (name, "spread", "ratio"):
            table.add_column(column, justify="right")
    for work, limit in report.bounds.items():
        timing = report.timing(own, work)
        cells = [
            *_rate(timing),
            f"{limit.share(timing.median):.0%}",
            limit.by,
            f"{limit.reads / timing.median / 1e9:.1f}",
            f"{limit.flops / timing.median / 1e9:.0f}",
        ]
        for name in peers:
            other = report.timing(name, work)
            cells += [*_rate(other), f"{other.median / timing.median:.2f}x"]
        table.add_row(work.name, *cells)
    return table


def _rate(timing: Timing) -> tuple[str, str]:
    """The median, and how far the repeats lie apart as a share of it."""
    median, least, most = timing.rate
    return f"{median:,.1f}", f"{(most - least) / median:.0%}"


def _operators(table: OperatorTable) -> Any:
    from rich.table import Table

    from llmc.bench.roofline import bound

    title = f"rank 0, last step of {table.work.name}: {table.inside * 1e6:,.0f} us in launches"
    shown = Table(box=None, title=title, title_justify="left", title_style="bold")
    for column in ("operator", "shape"):
        shown.add_column(column, no_wrap=True)
    for column in ("launches", "us", "of the step", "GB/s", "GFLOP/s", "of the bound", "by"):
        shown.add_column(column, justify="right")
    for row in table.rows:
        limit = bound(row.demand, table.rates)
        shown.add_row(
            row.op,
            row.kind,
            str(row.launches),
            f"{row.seconds * 1e6:,.0f}",
            f"{row.seconds / table.inside:.1%}",
            f"{limit.reads / row.seconds / 1e9:.1f}" if limit.reads else "",
            f"{limit.flops / row.seconds / 1e9:.1f}" if limit.flops else "",
            f"{limit.share(row.seconds):.0%}" if limit.seconds else "",
            limit.by if limit.seconds else "",
        )
    if table.work.kind == "decode":
        outside = max(table.seconds - table.inside, 0)
        shown.add_row("outside of launches", "", "", f"{outside * 1e6:,.0f}")
    return shown
