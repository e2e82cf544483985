"""From rows of logits to tokens: each sequence's parameters and history as the compiled sampler takes them.

Comes in: logits, `Sequence`s in the order of the rows. Goes out: `Sampled`. Must not know: processes, scheduling.

A random number depends on the sequence's seed and on how many tokens it has generated, and on nothing else: neither on
the rest of the batch, nor on chunks, nor on having been preempted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from llmc.runtime.core_sequence import Sequence
from llmc.runtime.messages import Logprob, TokenLogprobs
from llmc.runtime.native import HostLibrary, Sampled, SamplingRow
from llmc.runtime.params import MAX_LOGPROBS

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class _Fixed:
    """What stays the same over a sequence's life. `prompt` is empty unless a penalty looks at the history."""

    penalised: bool
    prompt: array[int]
    bias_ids: np.ndarray
    bias: np.ndarray
    stops: np.ndarray


class RowSampler:
    """Samples up to `max_rows` rows of `vocab` logits with a plan's own compiled code, on as many threads as given."""

    def __init__(self, library: HostLibrary, vocab: int, max_rows: int, threads: int) -> None:
        self._sampler = library.sampler(vocab, max_rows, MAX_LOGPROBS, threads)

    def sample(self, logits: np.ndarray, sequences: Seq[Sequence]) -> list[Sampled]:
        """logits f32[len(sequences), vocab], raw and unchanged; row i is the i-th sequence's."""
        return self._sampler.sample(logits, [_row(sequence) for sequence in sequences])


def _row(sequence: Sequence) -> SamplingRow:
    fixed = sequence.slot
    if fixed is None:
        fixed = sequence.slot = _fix(sequence)
    assert isinstance(fixed, _Fixed)
    p = sequence.params
    return SamplingRow(
        p.temperature,
        p.top_p,
        p.min_p,
        p.top_k,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
        -1 if p.logprobs is None else p.logprobs,
        sequence.seed,
        sequence.generated,
        fixed.prompt,
        sequence.tokens[sequence.num_prompt : sequence.num_prompt + sequence.generated] if fixed.penalised else _NONE,
        fixed.bias_ids,
        fixed.bias,
        fixed.stops if sequence.generated < p.min_tokens else _NONE,
    )


def _fix(sequence: Sequence) -> _Fixed:
    p = sequence.params
    penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
    return _Fixed(
        penalised,
        sequence.tokens[: sequence.num_prompt] if penalised else array("i"),
        np.fromiter(p.logit_bias.keys(), np.int32),
        np.fromiter(p.logit_bias.values(), np.float32),
        np.fromiter(sorted(sequence.stop_ids), np.int32),
    )


def logprobs_of(sampled: Sampled) -> TokenLogprobs:
    """As the front end gets them."""
    return TokenLogprobs(sampled.logprob, sampled.rank, [Logprob(token, value) for token, value in sampled.top])
