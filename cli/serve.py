"""`llmc serve`: a plan over HTTP. Options of the engine bear the names of `CoreOptions`, and go there as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


def parse_weights(text: str) -> dict[str, float]:
    """ "interactive=3,batch=1" as a mapping."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        name = name.strip()
        try:
            if not name or name in weights:
                raise ValueError
            weights[name] = float(weight)
        except ValueError:
            raise click.BadParameter(f"{part!r} in {text!r}; give name=weight, separated by commas") from None
    return weights


@click.command(name="serve")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint that the plan must be of, file by file.")
@click.option("--lock", type=click.Path(path_type=Path), help="Lock file that must pin the plan.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--kv-bytes", type=int, help="Bytes of KV cache, all ranks together. Default: what the core finds right.")
@click.option("--max-num-seqs", type=int, help="Sequences in execution at once; at most what the profile allows.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens of a step; at most what the profile allows.")
@click.option(
    "--itl-budget-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Milliseconds that a step may take while answers stream; prompts are cut to fit, by the speed measured.",
)
@click.option(
    "--max-long-prefills",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Prompts of more than four full steps that a priority class has at work at once.",
)
@click.option(
    "--priority-weights",
    default="interactive=3,batch=1",
    show_default=True,
    callback=lambda _, __, text: parse_weights(text),
    help="Classes that a request's `priority` may name, and their shares.",
)
@click.option(
    "--max-num-queued-reqs",
    default=1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sequences that may wait to be begun; more are answered 429.",
)
@click.option(
    "--queue-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that a sequence may wait to be begun before it is answered 429. Default: no limit.",
)
@click.option(
    "--kv-host-bytes",
    type=int,
    help="Bytes beside the KV cache for preempted requests and evicted prefixes, copied there and back where that is "
    "cheaper than computing anew.",
)
@click.option(
    "--kv-disk",
    type=click.Path(),
    help="Folder for prefixes that leave that memory: in a file without a name, gone with the server. What is on its "
    "way there takes up to 128 MiB of memory, and what comes faster is dropped. Needs --kv-disk-bytes.",
)
@click.option("--kv-disk-bytes", type=int, help="How much of the disk that file may take.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Reuse keys and values of equal prefixes."
)
@click.option(
    "--overlap/--no-overlap",
    default=True,
    show_default=True,
    help="Compose a step while the one before it is computed, or between the two. Answers are the same.",
)
@click.option(
    "--mmap/--no-mmap",
    default=True,
    show_default=True,
    help="Leave weights in the plan's file, shared by all who serve it, or copy each rank's into huge pages: decode is "
    "some per cent faster.",
)
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
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="LLMC_API_KEY",
    help="Key that requests must carry as Authorization: Bearer KEY; once or more. Arguments show in ps: "
    "prefer LLMC_API_KEY or --api-key-file. /health, /ready and /metrics stay open.",
)
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File of such keys, one a line.")
@click.option("--ssl-certfile", type=click.Path(path_type=Path), help="Certificate chain (PEM): serves HTTPS.")
@click.option("--ssl-keyfile", type=click.Path(path_type=Path), help="Its private key, if not in the same file.")
@click.option(
    "--allowed-origins",
    multiple=True,
    help="Origin whose web pages may read answers (CORS), such as https://chat.example; * for every one.",
)
@click.option(
    "--max-body-bytes",
    default=8 * 2**20,
    show_default=True,
    type=click.IntRange(min=1),
    help="Larger request bodies get 413.",
)
@click.option(
    "--max-connections",
    default=900,
    show_default=True,
    type=click.IntRange(min=1),
    help="While there are more, requests get 503 with Retry-After; /health, /ready and /metrics still answer.",
)
@click.option(
    "--request-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds in which a request must have arrived, head and body, before it gets 408.",
)
@click.option("--slo", help="Levels that /metrics counts goodput against, such as ttft=500ms,tpot=50ms.")
@click.option("--log-format", default="text", show_default=True, type=click.Choice(["text", "json"]))
@click.option("--log-requests/--no-log-requests", default=True, show_default=True, help="A line of log a request.")
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
    names: tuple[str, ...],
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    allowed_origins: tuple[str, ...],
    max_body_bytes: int,
    max_connections: int,
    request_timeout: float,
    slo: str | None,
    log_format: str,
    log_requests: bool,
    shutdown_timeout: float,
    **engine: Any,
) -> None:
    """Serve PLAN over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /version, /metrics."""
    from llmc.runtime.options import CoreOptions
    from llmc.runtime.server.access import read_keys
    from llmc.runtime.server.app import AppOptions
    from llmc.runtime.server.serve import ServeConfig, serve
    from llmc.runtime.server.slo import Slo

    app = AppOptions(read_keys(api_keys, api_key_file), allowed_origins, max_body_bytes, max_connections, log_requests)
    config = ServeConfig(
        plan,
        model,
        lock,
        host,
        port,
        names,
        CoreOptions.of(engine),
        shutdown_timeout,
        request_timeout,
        app,
        ssl_certfile,
        ssl_keyfile,
        log_format,
        None if slo is None else Slo.parse(slo),
    )
    sys.exit(serve(config))
