"""`llmc serve`: a plan over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(name="serve")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint that the plan must be of, file by file.")
@click.option("--lock", type=click.Path(path_type=Path), help="Lock file that must pin the plan.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--kv-bytes", type=int, help="Bytes of KV cache, all ranks together. Default: what the core finds right.")
@click.option("--max-num-seqs", type=int, help="Sequences in execution at once; at most what the profile allows.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens of a step; at most what the profile allows.")
@click.option("--served-model-name", "names", multiple=True, help="Name in the API; may be given more than once.")
@click.option("--threads", type=int, help="Threads per rank. Default: what the core finds right.")
@click.option(
    "--step-timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds after which a step counts as hung: requests get an error and the server exits with 1.",
)
@click.option(
    "--shutdown-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds that requests in flight get to finish after SIGTERM.",
)
def command(
    plan: Path,
    model: Path | None,
    lock: Path | None,
    host: str,
    port: int,
    kv_bytes: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    names: tuple[str, ...],
    threads: int | None,
    step_timeout: float,
    shutdown_timeout: float,
) -> None:
    """Serve PLAN over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /version, /metrics."""
    from llmc.runtime.options import CoreOptions
    from llmc.runtime.server.serve import ServeConfig, serve

    options = CoreOptions(
        kv_bytes=kv_bytes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
        step_timeout=step_timeout,
    )
    sys.exit(serve(ServeConfig(plan, model, lock, host, port, names, options, shutdown_timeout)))
