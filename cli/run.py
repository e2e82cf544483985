"""`llmc run`: one prompt or chat, answered on the terminal as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmc.runtime.engine import Answer, Engine
    from llmc.runtime.sequence import Delta

_SAMPLING = (
    click.option("--max-tokens", type=int, help="Longest answer. Default: what max_seq_len leaves."),
    click.option("--min-tokens", type=int, help="No end before that many tokens."),
    click.option("--temperature", type=float, help="0 is greedy."),
    click.option("--top-p", type=float, help="Smallest set of tokens with this probability."),
    click.option("--top-k", type=int, help="That many likeliest tokens; 0 for all."),
    click.option("--min-p", type=float, help="Tokens at least this likely, relative to the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1 discourages tokens of prompt and answer."),
    click.option("--presence-penalty", type=float, help="From -2 to 2; on tokens that the answer has."),
    click.option("--frequency-penalty", type=float, help="From -2 to 2; times how often the answer has them."),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given more than once."),
    click.option("--stop-token-id", "stop_token_ids", multiple=True, type=int, help="Token that ends the answer."),
    click.option("--include-stop", "include_stop_str_in_output", is_flag=True, default=None, help="Show that text."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end tokens."),
    click.option("--logprobs", type=int, help="With --json: log-probabilities, and those of that many alternatives."),
)


def _sampling_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_SAMPLING):
        function = option(function)
    return function


@click.command(name="run")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to go on from.")
@click.option("--chat", help="What the user says; goes through the plan's chat template.")
@click.option("--system", help="With --chat: the system message.")
@_sampling_options
@click.option("--kv-bytes", type=int, help="Bytes of KV cache, all ranks together.")
@click.option("--threads", type=int, help="Threads per rank.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the answer is complete.")
@click.option("--table", is_flag=True, help="Print a table of plan, launches and speed after the answer.")
@click.option("--build-report", type=click.Path(path_type=Path), help="With --table: what `llmc build --report` wrote.")
def command(
    plan: Path,
    prompt: str | None,
    chat: str | None,
    system: str | None,
    kv_bytes: int | None,
    threads: int | None,
    as_json: bool,
    table: bool,
    build_report: Path | None,
    **sampling: Any,
) -> None:
    """Answer one prompt with PLAN. The text goes to stdout, load time and speed to stderr."""
    from llmc.artifacts.errors import UsageError
    from llmc.runtime.engine import Engine

    if (prompt is None) == (chat is None):
        raise UsageError("give one of --prompt and --chat")
    if system is not None and chat is None:
        raise UsageError("--system needs --chat")
    if build_report is not None and not table:
        raise UsageError(f"--build-report {build_report} needs --table, which shows it")
    if sampling["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs needs --json, which prints them")
    if table and as_json:
        raise UsageError("--table and --json exclude one another")
    began = time.perf_counter()
    with Engine(plan, kv_bytes=kv_bytes, threads=threads) as engine:
        load_seconds = time.perf_counter() - began
        given = {name: value for name, value in sampling.items() if value is not None and value != ()}
        params = engine.text.params(given)
        if prompt is not None:
            deltas = engine.stream(prompt, params)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            deltas = engine.chat_stream([*messages, {"role": "user", "content": chat}], params)
        answer, seconds, first = _show(deltas, quiet=as_json)
        numbers = _numbers(answer, load_seconds, first, seconds)
        if as_json:
            _print_json(engine, answer, numbers)
        else:
            click.echo(_summary(answer, numbers), err=True)
        if table:
            from llmc.cli.table import print_table

            print_table(engine.plan, numbers, build_report)


def _show(deltas: Iterator[Delta], quiet: bool) -> tuple[Answer, float, float]:
    """The answer, the seconds it took, and those to its first token."""
    from llmc.runtime.engine import Answer

    answer = Answer()
    began = time.perf_counter()
    first = 0.0
    for delta in deltas:
        if not answer.token_ids and delta.tokens:
            first = time.perf_counter() - began
        answer.add(delta)
        if not quiet and delta.text:
            click.echo(delta.text, nl=False)
    if not quiet:
        click.echo()
    return answer, time.perf_counter() - began, first


def _numbers(answer: Answer, load: float, first: float, seconds: float) -> dict[str, float | None]:
    """Seconds, and tokens per second after the first token: None for an answer too short to tell."""
    more = len(answer.token_ids) - 1
    rate = more / (seconds - first) if more > 0 and seconds > first else None
    return {"load_seconds": load, "first_token_seconds": first, "seconds": seconds, "tokens_per_second": rate}


def _summary(answer: Answer, numbers: dict[str, float | None]) -> str:
    rate = numbers["tokens_per_second"]
    speed = "" if rate is None else f", {rate:.1f} tokens/s after it"
    return (
        f"loaded in {numbers['load_seconds']:.2f} s; first token after {numbers['first_token_seconds']:.3f} s; "
        f"{len(answer.token_ids)} tokens{speed}; ended by {answer.finish_reason}"
    )


def _print_json(engine: Engine, answer: Answer, numbers: dict[str, float | None]) -> None:
    import msgspec

    fields = msgspec.to_builtins(answer)
    fields["plan_digest"] = engine.plan.digest
    click.echo(msgspec.json.format(msgspec.json.encode({**fields, **numbers}), indent=2).decode())
