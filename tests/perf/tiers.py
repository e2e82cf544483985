"""How soon the first token comes where a long prefix is in KV blocks, in host memory, on a disk, or nowhere.

    python -m tests.perf.tiers build/bench-fp8.plan [--prefix 4096] [--rounds 3] [--disk FOLDER]

Comes in: a plan. Goes out: a table on stdout. One core without HTTP, whose pool and host memory hold the prefix once
each: fresh prompts push it from the one into the other and on to the disk. A round measures each way once, so that a
busy moment meets all of them. The disk's file is written out and dropped from the page cache before it is read. Each
answer must say that it found the prefix, and where, or the measurement is refused.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from llmc.artifacts.plan import Plan
from llmc.runtime.records import record_bytes
from tests.unit.runtime.fake_engine import Client

_TAIL = 17  # tokens after the prefix
_WAYS = ("computed", "KV blocks", "host memory", "disk")


class Bench:
    """A core in which one prefix has room, and what was measured of it."""

    def __init__(self, client: Client, vocab: int, prefix: int, pool_tokens: int) -> None:
        self._client, self._vocab, self._pool_tokens = client, vocab, pool_tokens
        self._prefix = prefix
        self._draw = random.Random(0)
        self._count = 0

    def tokens(self, count: int) -> list[int]:
        """A text that nobody has seen."""
        return [self._draw.randrange(self._vocab) for _ in range(count)]

    def first_token(self, prefix: list[int], way: str) -> float:
        """Seconds to the first token of the prefix and a fresh end. Raises RuntimeError where it came another way."""
        client, name = self._client, f"asks{self._count}"
        self._count += 1
        steps, before = (client.stats[-1].steps, client.stats[-1].shelf_hits) if client.stats else (0, {})
        began = time.perf_counter()
        client.submit(name, prefix + self.tokens(_TAIL), max_tokens=1)
        client.wait(lambda: bool(client.outputs[name]), 600)
        seconds = time.perf_counter() - began
        client.wait(lambda: client.idle() and client.stats[-1].steps > steps, 60)
        found = client.ended[name].cached_tokens
        gained = {tier: client.stats[-1].shelf_hits[tier] - before.get(tier, 0) for tier in ("host", "disk")}
        least = 0.9 * self._prefix
        came = {
            "computed": found == 0,
            "KV blocks": found >= least and not any(gained.values()),
            "host memory": found >= least and gained["host"] >= least and not gained["disk"],
            "disk": found >= least and gained["disk"] >= least,
        }
        if not came[way]:
            raise RuntimeError(f"{way}: {found} tokens were found, {gained} of them in lower tiers")
        return seconds

    def push(self) -> None:
        """Has the pool give up everything, to a prompt that is cancelled after its first step."""
        client, name = self._client, f"pushes{self._count}"
        self._count += 1
        steps = client.stats[-1].steps
        client.submit(name, self.tokens(self._pool_tokens - 1), max_tokens=1)
        client.wait(lambda: client.stats[-1].steps > steps, 60)
        client.abort(name)
        client.wait(client.idle, 60)

    def forget(self, folder: Path) -> None:
        """Writes the disk's file out, once no more comes, and drops it from the page cache."""
        fds = Path(f"/proc/{self._client.process.pid}/fd")
        links = [link for link in fds.iterdir() if os.readlink(link).startswith(str(folder))]
        (link,) = links
        descriptor = os.open(link, os.O_RDWR)
        blocks, before = os.fstat(descriptor).st_blocks, -1
        while blocks != before:
            time.sleep(0.5)
            before, blocks = blocks, os.fstat(descriptor).st_blocks
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def round(self, folder: Path) -> dict[str, float]:
        """Each way once."""
        prefix = self.tokens(self._prefix)
        found = {"computed": self.first_token(prefix, "computed")}
        found["KV blocks"] = self.first_token(prefix, "KV blocks")
        self.push()
        found["host memory"] = self.first_token(prefix, "host memory")
        self.first_token(self.tokens(self._prefix), "computed")  # the prefix goes to host memory
        self.push()  # and on to the disk
        self.forget(folder)
        found["disk"] = self.first_token(prefix, "disk")
        return found


def main() -> None:
    """Parses, measures, prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--prefix", type=int, default=4096, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    manifest = Plan.open(options.plan).manifest
    size = manifest.profile.block_size
    blocks = -(-(options.prefix + _TAIL + 1) // size) + 1
    sizes = {"num_blocks": blocks, "kv_host_bytes": blocks * manifest.kv_block_bytes}
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        disk = {"kv_disk": folder, "kv_disk_bytes": 4 * blocks * record_bytes(manifest.kv_block_bytes)}
        with Client(options.plan, **sizes, **disk) as client:
            bench = Bench(client, manifest.model.vocab_size, options.prefix, blocks * size)
            bench.first_token(bench.tokens(options.prefix), "computed")  # the first touches memory
            rounds = [bench.round(Path(folder)) for _ in range(options.rounds)]
    print(f"a prefix of {options.prefix} tokens, {options.prefix * manifest.kv_block_bytes // size / 1e6:.0f} MB:")
    for way in _WAYS:
        times = [1000 * one[way] for one in rounds]
        ratio = statistics.median(one["computed"] / one[way] for one in rounds)
        middle = statistics.median(times)
        print(f"{way:12} {middle:8.0f} ms ({min(times):.0f} to {max(times):.0f})  {ratio:6.1f}x")


if __name__ == "__main__":
    main()
