"""`llmc bench`: prefill, decode and load of a plan, beside a peer in the same run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmc.bench import Measurement


@click.command(name="bench")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--against", type=click.Choice(["transformers"]), help="Peer to time in the same run, at fp32, eager.")
@click.option("--model", type=click.Path(path_type=Path), help="With --against: the checkpoint that the peer loads.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--decode-tokens", default=32, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    plan: Path, against: str | None, model: Path | None, repeats: int, decode_tokens: int, as_json: bool
) -> None:
    """Time PLAN: 512 tokens of prefill, decode at batch 1, load to first token."""
    from llmc.artifacts.errors import UsageError
    from llmc.artifacts.verify import require_verified
    from llmc.runtime.machine import usable_cpus

    if (against is None) != (model is None):
        raise UsageError("--against and --model go together: the peer loads the checkpoint")
    opened = require_verified(plan, model)  # two systems, one model
    from llmc import bench

    longest = opened.manifest.profile.max_seq_len
    prefill_tokens = min(bench.PREFILL_TOKENS, longest)
    if bench.DECODE_PROMPT + decode_tokens > longest:
        raise UsageError(
            f"--decode-tokens {decode_tokens}: with {bench.DECODE_PROMPT} before them more than max_seq_len {longest}"
        )
    ids = [3 + i * 7919 % (opened.manifest.model.vocab_size - 3) for i in range(prefill_tokens)]
    with ExitStack() as stack:
        systems = [stack.enter_context(bench.engine(plan))]
        if model is not None:
            from llmc.cli.build import require_build_libraries

            require_build_libraries()
            systems.append(stack.enter_context(bench.transformers(model, usable_cpus())))
        rows = bench.measure(systems, ids, repeats, decode_tokens)
    if as_json:
        import dataclasses
        import json

        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        _print(rows, prefill_tokens)


def _print(rows: list[Measurement], prefill_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "system", f"prefill {prefill_tokens}, tok/s", "decode batch 1, tok/s", "load to first token, s", box=None
    )
    for row in rows:
        table.add_row(row.system, f"{row.prefill:.1f}", f"{row.decode:.1f}", f"{row.load:.2f}")
    console = Console()
    console.print(table)
    if len(rows) > 1:
        first, peer = rows[0], rows[1]
        console.print(
            f"ratio to the peer: prefill {first.prefill / peer.prefill:.2f}x, decode {first.decode / peer.decode:.2f}x"
        )
