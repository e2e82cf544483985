"""What composing steps costs, with overlap and without: `python -m tests.perf.overlap PLAN [--sequences 64]`.

Comes in: a plan. Goes out: a table on stdout. A core without HTTP answers as many requests as it may run at once, all
of them greedy and of one length; the two ways take turns, so that a neighbour on the machine meets both.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from llmc.artifacts.plan import Plan
from tests.unit.runtime.fake_engine import Client


def measure(client: Client, vocab: int, sequences: int, tokens: int, seed: int) -> dict[str, float]:
    """Of a round of requests: tokens a second of steps and gaps, a step in ms, and shares of a step in percent."""
    draw = random.Random(seed)
    before = client.stats[-1] if client.stats else None
    for i in range(sequences):
        prompt = [draw.randrange(vocab) for _ in range(32)]
        client.submit(f"{seed}-{i}", prompt, max_tokens=tokens, ignore_eos=True)
    client.wait(lambda: client.ended.keys() == client.tokens.keys(), 600)
    client.wait(lambda: client.idle() and client.stats[-1] is not before)

    def gained(name: str) -> float:
        return getattr(client.stats[-1], name) - (getattr(before, name) if before is not None else 0)

    seconds = gained("step_seconds")
    return {
        "tokens/s": gained("generation_tokens") / (seconds + gained("gap_seconds")),
        "step ms": 1000 * seconds / gained("steps"),
        "composing, % of a step": 100 * gained("schedule_seconds") / seconds,
        "ranks wait, % of a step": 100 * gained("gap_seconds") / seconds,
    }


def main() -> None:
    """Parses, measures, prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    vocab = Plan.open(arguments.plan).manifest.model.vocab_size
    with Client(arguments.plan, overlap=True) as ahead, Client(arguments.plan, overlap=False) as plain:
        clients = {"overlapped": ahead, "plain": plain}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
        for seed in range(arguments.rounds):
            for name, client in clients.items():
                found[name].append(measure(client, vocab, arguments.sequences, arguments.tokens, seed))
        same = ahead.tokens == plain.tokens
    for name, rounds in found.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        print(f"{name:11}" + "".join(f"  {key}: {value:.2f}" for key, value in middle.items()))
    print("the same tokens both ways" if same else "DIFFERENT TOKENS")


if __name__ == "__main__":
    main()
