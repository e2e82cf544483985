"""From rows of logits to tokens: each sequence's parameters and history as the compiled sampler takes them.

Comes in: logits, `Sequence`s in the order of the rows. Goes out: `Sampled`. Must not know: processes, scheduling.

A random number depends on the sequence's seed and on how many tokens it has generated, and on nothing else: neither on
the rest of the batch, nor on chunks, nor on having been preempted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.runtime.core_sequence import Sequence
from llmc.runtime.messages import Logprob, TokenLogprobs
from llmc.runtime.native import HostLibrary
from llmc.runtime.native_sampler import Sampled, SamplingRow
from llmc.runtime.params import MAX_LOGPROBS

_NONE = np.empty(0, np.int32)
#: SAMPLER_FIELDS of a row whose token the host chooses.
_HOST = (0,) * len(SAMPLER_FIELDS)
#: Two f32, the seed and the counter; and the same as i32.
_FIELDS, _WORDS = struct.Struct("<2fQI"), struct.Struct("<5i")


@dataclass
class _Fixed:
    """What stays the same over a sequence's life, and its `row`, in which a step renews the rest. `on_gpu`: `params_of`
    the row without the counter, which is their last; None until a GPU is asked.
    """

    penalised: bool
    stops: np.ndarray
    row: SamplingRow
    on_gpu: tuple[int, ...] | None = None


class RowSampler:
    """Samples up to `max_rows` rows of `vocab` logits with a plan's own compiled code, on as many threads as given."""

    def __init__(self, library: HostLibrary, vocab: int, max_rows: int, threads: int) -> None:
        self._sampler = library.sampler(vocab, max_rows, MAX_LOGPROBS, threads)

    def sample(self, logits: np.ndarray, sequences: Seq[Sequence]) -> list[Sampled]:
        """logits f32[len(sequences), vocab], raw and unchanged; row i is the i-th sequence's."""
        return self._sampler.sample(logits, [_row(sequence) for sequence in sequences])

    def complete(
        self, logits: np.ndarray, sequences: Seq[Sequence], sampler_params: np.ndarray, tokens: np.ndarray
    ) -> list[Sampled]:
        """As `sample`, where a GPU has chosen `tokens` i32[rows] as `sampler_params_of` the sequences said; logits are
        those of the other rows.
        """
        on_gpu = sampler_params[:, 0] != 0
        rest = np.flatnonzero(~on_gpu)
        own = iter(self.sample(logits[rest], [sequences[row] for row in rest.tolist()]))
        pairs = zip(tokens.tolist(), on_gpu.tolist(), strict=True)
        return [Sampled(token, 0.0, 0) if chosen else next(own) for token, chosen in pairs]


def sampler_params_of(sequences: Seq[Sequence]) -> np.ndarray:
    """How a GPU is to choose the sequences' next tokens: i32[rows, len(SAMPLER_FIELDS)]."""
    return np.array([_params(sequence) for sequence in sequences], np.int32).reshape(-1, len(SAMPLER_FIELDS))


def _params(sequence: Sequence) -> tuple[int, ...]:
    """`params_of` the sequence's row: the GPU waits meanwhile, so that what stays the same is worked out once."""
    fixed = _fixed(sequence)
    if len(_banned(sequence, fixed)):
        return _HOST
    if fixed.on_gpu is None:
        fixed.on_gpu = params_of(_row(sequence))[:-1]
    return (*fixed.on_gpu, sequence.generated) if fixed.on_gpu[0] else _HOST


def params_of(row: SamplingRow) -> tuple[int, ...]:
    """SAMPLER_FIELDS of a row; zeros, for the host, where its logits are changed or their logarithms wanted."""
    changed = (row.repetition_penalty, row.presence_penalty, row.frequency_penalty) != (1.0, 0.0, 0.0)
    if changed or len(row.bias_ids) or len(row.banned) or row.num_logprobs >= 0:
        return _HOST
    temperature, top_p, low, high, counter = _WORDS.unpack(
        _FIELDS.pack(row.temperature, row.top_p, row.seed, row.counter)
    )
    least = math.ceil(min(_single(row.min_p), 1.0) * 2**30)
    return 1, temperature, top_p, row.top_k, least, low, high, counter


def _single(value: float) -> float:
    """The nearest f32, which is what the sampler is given."""
    return float(np.float32(value))


def _row(sequence: Sequence) -> SamplingRow:
    fixed = _fixed(sequence)
    row = fixed.row
    row.counter = sequence.generated
    row.banned = _banned(sequence, fixed)
    if fixed.penalised:
        row.output = sequence.tokens[sequence.num_prompt : sequence.num_prompt + sequence.generated]
    return row


def _banned(sequence: Sequence, fixed: _Fixed) -> np.ndarray:
    return fixed.stops if sequence.generated < sequence.params.min_tokens else _NONE


def _fixed(sequence: Sequence) -> _Fixed:
    if sequence.slot is None:
        sequence.slot = _fix(sequence)
    assert isinstance(sequence.slot, _Fixed)
    return sequence.slot


def _fix(sequence: Sequence) -> _Fixed:
    p = sequence.params
    penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
    row = SamplingRow(
        p.temperature,
        p.top_p,
        p.min_p,
        p.top_k,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
        -1 if p.logprobs is None else p.logprobs,
        sequence.seed,
        prompt=sequence.tokens[: sequence.num_prompt] if penalised else _NONE,
        bias_ids=np.fromiter(p.logit_bias.keys(), np.int32),
        bias=np.fromiter(p.logit_bias.values(), np.float32),
    )
    return _Fixed(penalised, np.fromiter(sorted(sequence.stop_ids), np.int32), row)


def logprobs_of(sampled: Sampled) -> TokenLogprobs:
    """As the front end gets them."""
    return TokenLogprobs(sampled.logprob, sampled.rank, [Logprob(token, value) for token, value in sampled.top])
