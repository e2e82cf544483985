"""Runs a server under mixed load and says what was found; exit code 1 for anything that should not be.

It checks that nobody hangs, that every answer is the one that the request gets alone, that all blocks of KV are free in
the end, that no process keeps growing, and that SIGTERM ends the server with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from llmc.artifacts.plan import Plan
from tests.soak.clients import HANG_SECONDS, SoakClient, Tally, solo
from tests.soak.requests import make_request
from tests.unit.runtime.fake_engine import NAN_TOKEN, children, write_engine_plan
from tests.unit.runtime.servers import Server
from tests.unit.runtime.test_server_core import with_tokenizer

_SAMPLE_SECONDS = 1.0
#: By so much a process may grow in the second half of the run: an allocator's own ups and downs.
_GROWTH_BYTES, _GROWTH_SHARE = 4e6, 0.02


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def growth(samples: list[int]) -> float:
    """Bytes by which the last quarter's median is over the second quarter's."""
    quarter = len(samples) // 4
    return statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter])


async def load(server: Server, plan: Plan, arguments: argparse.Namespace, pids: dict[str, int]) -> tuple[Tally, dict]:
    """Solo answers first, then all clients for the time asked."""
    rng = random.Random(arguments.seed)
    model, profile = plan.manifest.model, plan.manifest.profile
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(HANG_SECONDS)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=timeout, trust_env=False) as http:
        # The tiny engine takes one token for a sign to break, and the one after it ends an answer.
        vocab, banned = (model.vocab_size, None) if arguments.plan else (NAN_TOKEN, NAN_TOKEN)
        bodies = [make_request(rng, vocab, profile.max_seq_len, banned) for _ in range(arguments.requests)]
        truth = [(body, await solo(http, body)) for body in bodies]
        print(f"{len(truth)} requests answered alone", flush=True)
        tally, stop = Tally(), asyncio.Event()
        samples: dict[str, list[int]] = {name: [] for name in pids}
        tasks = [
            asyncio.create_task(SoakClient(http, truth, seed).run(stop, tally)) for seed in range(arguments.clients)
        ]
        end = time.monotonic() + arguments.minutes * 60
        while time.monotonic() < end:
            await asyncio.sleep(_SAMPLE_SECONDS)
            for name, pid in pids.items():
                with contextlib.suppress(FileNotFoundError):
                    samples[name].append(resident(pid))
            if server.process.poll() is not None:
                tally.wrong.append("the server has ended")
                break
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_SECONDS + 10)
    return tally, samples


def judge(server: Server, tally: Tally, samples: dict[str, list[int]]) -> None:
    """Adds to the tally what is not as it was at the start."""
    try:
        server.wait_for(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0, 30)
    except AssertionError:
        tally.wrong.append("sequences run though every client has gone")
    if (used := server.metric("kv_cache_usage_perc")) != 0:
        tally.wrong.append(f"{used:.2%} of the KV blocks are held though nothing runs")
    for name, values in samples.items():
        grown = growth(values)
        print(f"{name}: {statistics.median(values) / 1e6:.1f} MB, {grown / 1e6:+.2f} MB from second to last quarter")
        if grown > max(_GROWTH_BYTES, _GROWTH_SHARE * statistics.median(values)):
            tally.wrong.append(f"{name} grows: {grown / 1e6:+.1f} MB")
    for name in (
        "num_preemptions_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_hits_total",
        "engine_steps_total",
        "generation_tokens_total",
    ):
        print(f"{name}: {server.metric(name):.0f}")


def main() -> int:
    """Parses, runs, prints; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200, help="different ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", type=Path, help="default: a tiny engine that answers wrongly if its KV is wrong")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options: list[str] = ["--no-log-requests"]
        path = arguments.plan
        if path is None:
            path = with_tokenizer(write_engine_plan(Path(folder) / "engine.plan", tp=2, max_num_seqs=16))
            options += ["--kv-bytes", str(40 * 64)]  # so few blocks that sequences are preempted
            options += ["--kv-host-bytes", str(80 * 64)]
            options += ["--kv-disk", folder, "--kv-disk-bytes", str(2**20)]
        server = Server([sys.executable, "-m", "llmc", "serve", str(path), *options], {})
        try:
            server.wait_ready(300)
            core = server.core_pid()
            ranks = {f"rank {i}": pid for i, pid in enumerate(children(core))}
            pids = {"http": server.process.pid, "core": core, **ranks}
            tally, samples = asyncio.run(load(server, Plan.open(path), arguments, pids))
            if server.process.poll() is None:
                judge(server, tally, samples)
                server.process.send_signal(signal.SIGTERM)
            if (code := server.finish(60)) != 0:
                tally.wrong.append(f"the server ended with {code}")
            if "Traceback" in server.log or "internal error" in server.log:
                tally.wrong.append(f"the log: {server.log[-2000:]}")
        finally:
            server.close()
    print(", ".join(f"{count} {name}" for name, count in sorted(tally.counts.items())))
    for text in tally.wrong[:20]:
        print(f"WRONG {text}"[:1000])
    print(f"{len(tally.wrong)} things wrong in {arguments.minutes:g} minutes with {arguments.clients} clients")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
