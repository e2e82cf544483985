"""How large a step's arrays may be: the optimization profiles of a network. Comes in: a shape profile. Goes out: ranges
of each symbol. Must not know: TensorRT, operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.types import Dim

#: Sequences of the steps that a profile is tuned for, where it may have so many.
_USUAL_SEQUENCES = 8
#: How many times the blocks of all sequences a pool may have: it keeps prefixes too.
_POOLS = 16


@dataclass(frozen=True)
class Range:
    """The least and the most that a size may be, and what the engine is tuned for."""

    least: int
    usual: int
    most: int

    def __add__(self, other: int) -> Range:
        return Range(self.least + other, self.usual + other, self.most + other)


#: Symbol -> its range: T tokens, S rows of logits, num_seqs, num_seqs_and_1, `queries`, the most tokens that one
#: sequence has in a step, and num_blocks of a pool.
Ranges = Mapping[str, Range]


def step_ranges(profile: ShapeProfile) -> tuple[Ranges, Ranges]:
    """Of decode steps, in which each sequence has one token and its logits are wanted, and of any mixture: in the order
    of artifacts/trt_program.py.
    """
    tokens = profile.max_num_batched_tokens
    most = min(profile.max_num_seqs, tokens)
    sequences = Range(1, min(_USUAL_SEQUENCES, most), most)
    decode = {"T": sequences, "S": sequences, "queries": Range(1, 1, 1)}
    usual, longest = profile.token_ranges[-1].opt, profile.max_seq_len
    mixed = {
        "T": Range(1, usual, tokens),
        "S": sequences,
        "queries": Range(1, min(usual, longest), min(tokens, longest)),
    }
    blocks = most * -(-profile.max_seq_len // profile.block_size)
    both = {
        "num_seqs": sequences,
        "num_seqs_and_1": sequences + 1,
        "num_blocks": Range(1, blocks, _POOLS * blocks),
    }
    return {**decode, **both}, {**mixed, **both}


def shapes(dims: Sequence[Dim], ranges: Ranges) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The least, usual and largest shape of an array."""
    by_dim = [ranges[d] if isinstance(d, str) else Range(d, d, d) for d in dims]
    return tuple(r.least for r in by_dim), tuple(r.usual for r in by_dim), tuple(r.most for r in by_dim)
