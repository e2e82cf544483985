"""What the size of a block costs and gains: `python -m tests.perf.blocks [--threads 2] [--rounds 3]`.

Goes out: for each block size a line on stdout. The time is that of attention (9 heads on 3 of 64, bf16) of one token at
a context of 8192, the best of rounds in which the sizes take turns. The hit rate is the share of tokens found in the
prefix cache, of those that an earlier request had: requests begin alike for 1 to 512 tokens, evenly, and blocks that
are not full are not shared.
"""

from __future__ import annotations

import argparse
import random
from array import array

from llmc.runtime.blocks import ROOT, BlockPool, Root
from tests.perf.attention import Shape, measure
from tests.unit.plugins.compiled import ISAS

SIZES = (16, 32, 64)
_LONGEST, _PAIRS, _REPEAT = 512, 1000, 50


def hit_rate(size: int) -> float:
    """Of pairs of prompts of which the second begins as the first did: tokens found over tokens alike."""
    draw, found, alike = random.Random(0), 0, 0
    for _ in range(_PAIRS):
        common = draw.randint(1, _LONGEST)
        tokens = array("i", [draw.randrange(1000) for _ in range(common)])
        pool = BlockPool(2 * _LONGEST // size, size)
        parent: Root = ROOT
        first = tokens + array("i", [1000] * size)
        for start in range(0, len(first) - size + 1, size):
            parent = pool.commit(parent, tuple(first[start : start + size]), pool.allocate())
        second = tokens + array("i", [1001] * size)
        found += size * len(pool.match(second, (len(second) - 1) // size))
        alike += common
    return found / alike


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shapes = [Shape("decode", 9, 3, 64, "bf16", 8192, 1, size) for size in SIZES]
    launches = [shape.launch() for shape in shapes]
    times: list[list[float]] = [[] for _ in shapes]
    for _ in range(options.rounds):
        for index, shape in enumerate(shapes):
            times[index].append(measure(shape, index, launches, ISAS[0], options.threads, _REPEAT))
    for shape, found in zip(shapes, times, strict=True):
        rate = hit_rate(shape.block_size)
        print(f"block size {shape.block_size}: {min(found) * 1e6:6.0f} us  {rate:6.1%} of a shared prefix")


if __name__ == "__main__":
    main()
