"""For which decode steps there are graphs, and what they take of a GPU's memory.

Comes in: numbers of sequences and of tokens of context. Goes out: the size and context that a graph is captured for.
Must not know: the driver, engines.
"""

from __future__ import annotations

#: Sequences up to which every power of two has a graph; from there on every multiple of it.
_SMALL = 8
#: The shortest context that graphs tell apart.
_CONTEXT = 256
#: How many graphs are held; the least recently used one goes.
MOST_GRAPHS = 64
#: Bytes of the GPU's memory that a launch takes in a graph. Assumed, not measured: no document of the driver says it.
#: Where it is more, graphs are given up in time (see `graphs`).
LAUNCH_BYTES = 16 << 10


def bucket(sequences: int, most: int) -> int:
    """The size of the graph for so many sequences."""
    found = 1 << (sequences - 1).bit_length() if sequences <= _SMALL else -(-sequences // _SMALL) * _SMALL
    return min(found, most)


def context_bucket(context: int, most: int) -> int:
    """The context that a graph is captured for."""
    return min(max(1 << (context - 1).bit_length(), _CONTEXT), most)


def graphs_bytes(sequences: int, context: int, launches: int) -> int:
    """What the graphs of a plan can take that serves so many sequences of so much context, of `launches` each."""
    sizes = len({bucket(count, sequences) for count in range(1, sequences + 1)})
    contexts = len({context_bucket(min(1 << power, context), context) for power in range(context.bit_length() + 1)})
    return min(sizes * contexts, MOST_GRAPHS) * launches * LAUNCH_BYTES
