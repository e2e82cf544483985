"""Throughput over latency of `llmc serve` and of llama.cpp's server, at the same loads, as picture, JSON and table.

    python -m tests.perf.frontier build/bench-fp8.plan build/model/SmolLM2-135M-Instruct.Q8_0.gguf \
        --concurrency 1,2,4,8,16 --out build

Both servers stand ready at once, with as many threads, slots and tokens of context a slot, and take turns at every
load, so that a busy moment of the machine meets both; the one that waits computes nothing. The prompts of a load are
the same for both and come at no other load, so that no cache has them. Answers are greedy and of full length. Goes
out, in the folder `--out`: `frontier-<server>.jsonl` (a line a run, with the keys of `llmc bench serve`),
`frontier.svg` and `frontier.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmc.artifacts.machine import usable_cpus
from llmc.artifacts.plan import Plan
from llmc.bench.machine import cpu_name
from llmc.bench.serving.client import Target
from llmc.bench.serving.frontier import draw
from llmc.bench.serving.run import measure, result
from llmc.bench.serving.workload import Workload
from tests.unit.runtime.servers import Server

#: The columns of the table: key of a result, head, digits.
_COLUMNS = (("output_throughput", "tokens/s", 1), ("median_ttft_ms", "TTFT ms", 0), ("median_tpot_ms", "TPOT ms", 1))
_TIMEOUT = 600.0


def commands(options: argparse.Namespace, threads: int) -> dict[str, tuple[list[str], str]]:
    """How each server is started, less the port, and the path that answers 200 once it serves, by its name."""
    manifest = Plan.open(options.plan).manifest
    blocks = -(-options.slots * options.context // manifest.profile.block_size)
    slots, context = str(options.slots), str(options.context)
    llmc = [sys.executable, "-m", "llmc", "serve", str(options.plan), "--no-log-requests", "--threads", str(threads)]
    llmc += ["--max-num-seqs", slots, "--kv-bytes", str(blocks * manifest.kv_block_bytes)]
    peer = [sys.executable, "-m", "tests.perf.llama_server", str(options.model), "--threads", str(threads)]
    peer += ["--parallel", slots, "--context", context]
    return {
        f"llmc {manifest.build.precision}": (llmc, "/ready"),
        f"llama.cpp {options.model.suffixes[-2].removeprefix('.')}": (peer, "/health"),
    }


def run(server: Server, name: str, seats: int, options: argparse.Namespace) -> dict[str, Any]:
    """One server at one load. Raises RuntimeError where a request was not answered."""
    count = max(options.least, options.rounds * seats)
    work = Workload(count, options.input_len, options.output_len, seed=seats)
    target = Target(server.url, None, ignore_eos=True, extra={"temperature": 0})
    measured, seconds = asyncio.run(measure(work, target, max_concurrency=seats, timeout=_TIMEOUT, headers={}))
    errors = {m.error for m in measured if m.error}
    if errors:
        raise RuntimeError(f"{name} at {seats} at once: {sorted(errors)[0]}")
    return result(work, target, measured, seconds, max_concurrency=seats, label=name, slo=None)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a load, three columns a server, and the first server's throughput over the second's."""
    names = list(dict.fromkeys(run["label"] for run in runs))
    by_load: dict[int, dict[str, dict[str, Any]]] = {}
    for run in runs:
        by_load.setdefault(run["max_concurrency"], {})[run["label"]] = run
    head = ["at once", *(f"{name}: {title}" for name in names for _, title, _ in _COLUMNS), "tokens/s, ratio"]
    rows = [head, ["---:"] * len(head)]
    for load, found in by_load.items():
        cells = [f"{found[name][key]:.{digits}f}" for name in names for key, _, digits in _COLUMNS]
        first, second = (found[name]["output_throughput"] for name in names)
        rows.append([str(load), *cells, f"{first / second:.2f}x"])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("model", type=Path, help="GGUF file for llama.cpp, named MODEL.KIND.gguf")
    parser.add_argument("--concurrency", default="1,2,4,8,16", help="requests at once, a sweep")
    parser.add_argument("--slots", type=int, default=16, help="sequences that each server may have at work")
    parser.add_argument("--context", type=int, default=512, help="tokens of KV a slot")
    parser.add_argument("--input-len", type=int, default=128, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="requests of a load over requests at once")
    parser.add_argument("--least", type=int, default=8, help="requests of a load at least")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder")
    options = parser.parse_args()
    loads, threads = [int(part) for part in options.concurrency.split(",")], usable_cpus()
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {}
        for name, (command, ready) in commands(options, threads).items():
            servers[name] = server = Server(command, {})
            stack.callback(server.close)
            server.wait_for(lambda server=server, ready=ready: server.status(ready) == 200, 120)
        for load in loads:
            for name, server in servers.items():
                runs.append(run(server, name, load, options))
                print(f"{name}, {load} at once: {runs[-1]['output_throughput']:.1f} tokens/s", flush=True)
    for name in servers:
        lines = [json.dumps(run) + "\n" for run in runs if run["label"] == name]
        (options.out / f"frontier-{name.split()[0]}.jsonl").write_text("".join(lines))
    (options.out / "frontier.svg").write_text(draw(runs))
    about = (
        f"{cpu_name()}, {threads} threads, {options.slots} slots of {options.context} tokens; prompts of "
        f"{options.input_len} words, answers of {options.output_len} tokens; medians of a load's requests.\n\n"
    )
    text = about + table(runs)
    print(text, end="")
    (options.out / "frontier.md").write_text(text)


if __name__ == "__main__":
    main()
