"""`llmc bench serve`: load on any server with OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


class _Loads(click.ParamType):
    """Numbers above zero separated by commas, `inf` among them."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """As a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(self._kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,4,16", param, ctx)
        if not all(number > 0 for number in found):
            self.fail(f"{value!r} has a number that is not above 0", param, ctx)
        return found


@click.command(name="serve")
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="The server, without /v1.")
@click.option("--model", help="Model name in requests. Default: none is sent.")
@click.option("--endpoint", default="completions", show_default=True, type=click.Choice(["completions", "chat"]))
@click.option("--num-prompts", default=100, show_default=True, type=click.IntRange(min=1), help="Requests of a run.")
@click.option("--input-len", default=256, show_default=True, type=click.IntRange(min=1), help="Words of a prompt.")
@click.option(
    "--output-len", default=64, show_default=True, type=click.IntRange(min=1), help="Most tokens of an answer."
)
@click.option(
    "--range-ratio",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Lengths are drawn evenly from (1 - r) to (1 + r) times those.",
)
@click.option("--prefix-len", default=0, show_default=True, type=click.IntRange(min=0), help="Words of shared prefix.")
@click.option(
    "--num-prefixes", default=1, show_default=True, type=click.IntRange(min=1), help="Prefixes, used in turn."
)
@click.option(
    "--request-rate", "rates", default="inf", show_default=True, type=_Loads(float), help="Requests a second, a sweep."
)
@click.option(
    "--burstiness",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Of arrivals: 1 is Poisson, below comes in bursts, above more evenly.",
)
@click.option("--max-concurrency", "seats", type=_Loads(int), help="Requests at once, a sweep. Default: no bound.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length (an extension that servers share).")
@click.option("--extra-body", default="{}", help="JSON object that is added to each request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as Authorization: Bearer KEY.")
@click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds without a byte after which a request failed."
)
@click.option("--slo", help="Levels that goodput counts against, such as ttft=500ms,tpot=50ms.")
@click.option("--seed", default=0, show_default=True)
@click.option("--label", help="The server's name in results and picture.")
@click.option(
    "--result-filename", type=click.Path(path_type=Path), help="Append each run to this file as a line of JSON."
)
@click.option("--save-detailed", is_flag=True, help="With each request's lengths, times, text and error.")
@click.option("--compare", multiple=True, type=click.Path(path_type=Path), help="Result file drawn beside these runs.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw throughput over latency into this file, FILE.svg.")
def command(
    base_url: str,
    model: str | None,
    endpoint: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    num_prefixes: int,
    rates: tuple[float, ...],
    burstiness: float,
    seats: tuple[int, ...] | None,
    ignore_eos: bool,
    extra_body: str,
    api_key: str | None,
    timeout: float,
    slo: str | None,
    seed: int,
    label: str | None,
    result_filename: Path | None,
    save_detailed: bool,
    compare: tuple[Path, ...],
    plot: Path | None,
) -> None:
    """Measure a running server under load: throughput, TTFT, TPOT, ITL, end-to-end latency, goodput.

    One run for each --request-rate and --max-concurrency. Results have the keys that `vllm bench serve` writes.
    """
    import asyncio

    from llmc.artifacts.errors import EnvironmentFault, UsageError

    try:
        from llmc.bench.serving.client import Target
        from llmc.bench.serving.run import measure, result
    except ImportError as error:
        raise EnvironmentFault(f"llmc bench serve needs httpx: pip install 'llmc[bench]' ({error})") from error
    from llmc.bench.serving.frontier import draw
    from llmc.bench.serving.workload import Workload
    from llmc.runtime.server.slo import Slo

    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: the picture is written as SVG; name a file that ends in .svg")
    levels = None if slo is None else Slo.parse(slo)
    others = [run for file in compare for run in _read(file)]
    target = Target(base_url.rstrip("/"), model, endpoint == "chat", ignore_eos, _object(extra_body))
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    results = []
    for rate in rates:
        for seat in seats or (None,):
            shape = (num_prompts, input_len, output_len, range_ratio, prefix_len, num_prefixes, rate, burstiness, seed)
            work = Workload(*shape)
            measured, seconds = asyncio.run(
                measure(work, target, max_concurrency=seat, timeout=timeout, headers=headers)
            )
            run = result(
                work,
                target,
                measured,
                seconds,
                max_concurrency=seat,
                label=label,
                slo=levels,
                detailed=save_detailed,
            )
            results.append(run)
            if result_filename is not None:
                with result_filename.open("a") as file:
                    file.write(json.dumps(run) + "\n")
            for text in sorted({m.error for m in measured if m.error})[:3]:
                click.echo(f"failed: {text}", err=True)
    _print(results)
    if plot is not None:
        try:
            plot.write_text(draw([*results, *others]))
        except ValueError as error:
            raise UsageError(f"--plot {plot}: {error}") from error
    if not any(run["completed"] for run in results):
        raise EnvironmentFault(f"{base_url}: no request was answered")


def _object(text: str) -> dict[str, Any]:
    from llmc.artifacts.errors import UsageError

    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body {text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--extra-body {text!r} is not a JSON object")
    return found


def _read(file: Path) -> list[dict[str, Any]]:
    from llmc.artifacts.errors import UsageError

    try:
        return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--compare {file}: cannot be read as lines of JSON: {error}") from error


def _print(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, title="medians, and 99th percentiles, in ms", title_justify="left", title_style="bold")
    for column in ("rate", "at once", "done", "failed", "req/s", "good/s", "out tok/s", "TTFT", "TPOT", "ITL", "E2E"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in results:
        good = run["request_goodput"]
        table.add_row(
            str(run["request_rate"]),
            str(run["max_concurrency"] or ""),
            str(run["completed"]),
            str(run["failed"]),
            f"{run['request_throughput']:.2f}",
            "" if good is None else f"{good:.2f}",
            f"{run['output_throughput']:.1f}",
            *(
                f"{run[f'median_{name}_ms']:.1f} {run[f'p99_{name}_ms']:.1f}"
                for name in ("ttft", "tpot", "itl", "e2el")
            ),
        )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
