"""The compiled sampler as Python calls it: `llmc_sample` of plugins/cpu/abi.h.

Comes in: logits, a `SamplingRow` for each. Goes out: `Sampled`. Must not know: plans, schedulers, messages. Standard
library and numpy only. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


class SamplingStruct(ctypes.Structure):
    """llmc_sampling."""

    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("num_logprobs", c_int32),
        ("seed", c_uint64),
        ("counter", c_uint64),
        ("prompt", c_void_p),
        ("num_prompt", c_int32),
        ("num_output", c_int32),
        ("output", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("num_bias", c_int32),
        ("num_banned", c_int32),
        ("banned", c_void_p),
    ]


#: The same, to be filled at once.
_SAMPLING = struct.Struct("@3fi3fi2QP2i3P2iP")


class SampledStruct(ctypes.Structure):
    """llmc_sampled."""

    _fields_ = [("token", c_int32), ("logprob", c_float), ("rank", c_int32), ("reserved", c_int32)]


def address_of(values: np.ndarray | array[int] | None, dtype: type, name: str) -> int | None:
    """Where the elements start; raises TypeError unless they are contiguous and of `dtype`."""
    if values is None or len(values) == 0:
        return None
    if isinstance(values, array):
        if values.typecode != "i" or dtype is not np.int32:
            raise TypeError(f"{name}: array of typecode {values.typecode!r}, expected {np.dtype(dtype)}")
        return values.buffer_info()[0]
    if values.dtype != dtype or not values.flags.c_contiguous:
        raise TypeError(f"{name}: {values.dtype}, strides {values.strides}; expected contiguous {np.dtype(dtype)}")
    return values.ctypes.data


_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class SamplingRow:
    """How one row is sampled; the fields of `llmc_sampling`. `prompt`, `output`: the tokens that the penalties look at,
    i32 arrays or array('i'); they may be left empty where no penalty is on. A sequence keeps its row: a step may change
    its counter, `output` and `banned`, and nothing else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_logprobs: int = -1
    seed: int = 0
    counter: int = 0
    prompt: np.ndarray | array[int] = field(default_factory=lambda: _NONE)
    output: np.ndarray | array[int] = field(default_factory=lambda: _NONE)
    bias_ids: np.ndarray = field(default_factory=lambda: _NONE)
    bias: np.ndarray = field(default_factory=lambda: _NONE)
    banned: np.ndarray = field(default_factory=lambda: _NONE)


class Sampled(NamedTuple):
    """One row's token, -1 where the row held NaN or infinity or nothing was left to choose from. `logprob`, `rank`,
    `top` (ids and log-probabilities, best first) are filled where the row asked for logprobs.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


#: Logits from which on rows are sampled on several threads: less takes no longer than telling them. And about how many
#: a thread takes at a time: who begins late, or has lost its processor, holds up the others no longer than these take.
_SHARED_LOGITS, _PIECE_LOGITS = 1 << 19, 1 << 18


class Sampler:
    """Samples rows of logits, on up to `threads` threads; its scratch is allocated once."""

    def __init__(self, dll: ctypes.CDLL, vocab: int, max_rows: int, max_logprobs: int, threads: int = 1) -> None:
        self._dll, self.vocab, self.max_logprobs, self._max_rows = dll, vocab, max_logprobs, max_rows
        self._params = np.zeros((max_rows, _SAMPLING.size // 8), np.uint64)
        self._counters = self._params[:, SamplingStruct.counter.offset // 8]
        self._struct = self._params.data.cast("B")
        self._filled: list[SamplingRow | None] = [None] * max_rows  # rows of which only the counter will change
        self._sampled = np.zeros((max_rows, ctypes.sizeof(SampledStruct) // 4), np.int32)
        self._top_ids = np.zeros((max_rows, max(max_logprobs, 1)), np.int32)
        self._top_logprobs = np.zeros((max_rows, max(max_logprobs, 1)), np.float32)
        self._scratch = [(np.zeros(vocab, np.float32), np.zeros(vocab, np.int32)) for _ in range(threads)]
        arrays = (self._params, self._sampled, self._top_ids, self._top_logprobs)
        #: Where what is of a row begins, and how far apart.
        self._places = [(x.ctypes.data, x.strides[0]) for x in arrays]
        self._others: ThreadPoolExecutor | None = None
        if threads > 1:
            from concurrent.futures import ThreadPoolExecutor  # here: ranks sample nothing, and start the sooner

            self._others = ThreadPoolExecutor(threads - 1, "sampler")

    def sample(self, logits: np.ndarray, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """logits f32[len(rows), vocab], unchanged. Raises ValueError for other shapes or too many rows."""
        count = len(rows)
        if logits.shape != (count, self.vocab) or count > self._max_rows:
            raise ValueError(f"logits {logits.shape} for {count} rows; room for {self._max_rows}x{self.vocab}")
        if not rows:
            return []
        for index, (row, filled) in enumerate(zip(rows, self._filled, strict=False)):
            if row is not filled or len(row.output) or len(row.banned):
                self._fill(index, row)
        self._counters[:count] = [row.counter for row in rows]
        address = address_of(logits, np.float32, "logits")
        assert address is not None
        shared = self._others is not None and count > 1 and logits.size >= _SHARED_LOGITS
        size = -(-_PIECE_LOGITS // self.vocab) if shared else count
        starts = iter(range(0, count, size))  # each taken by one thread
        others = []
        if shared:
            assert self._others is not None
            threads = min(len(self._scratch), len(range(0, count, size)))
            others = [self._others.submit(self._take, address, starts, size, count, i) for i in range(1, threads)]
        self._take(address, starts, size, count, 0)
        for other in others:
            other.result()
        return self._results(rows)

    def _take(self, logits: int, starts: Iterator[int], size: int, count: int, thread: int) -> None:
        """Samples pieces of `size` of the `count` rows until none is left, in the scratch of one thread."""
        (params, param), (sampled, result), (ids, some), (logprobs, _) = self._places
        scratch, scratch_ids = (x.ctypes.data for x in self._scratch[thread])
        for first in starts:
            self._dll.llmc_sample(
                logits + 4 * first * self.vocab, min(size, count - first), self.vocab, params + first * param,
                sampled + first * result, ids + first * some, logprobs + first * some, self._top_ids.shape[1],
                scratch, scratch_ids,
            )  # fmt: skip

    def _fill(self, index: int, row: SamplingRow) -> None:
        self._filled[index] = None
        if row.num_logprobs > self.max_logprobs:
            raise ValueError(f"num_logprobs={row.num_logprobs} is more than the sampler's {self.max_logprobs}")
        if len(row.bias_ids) != len(row.bias):
            raise ValueError(f"{len(row.bias_ids)} bias ids for {len(row.bias)} biases")
        _SAMPLING.pack_into(
            self._struct, index * _SAMPLING.size,
            row.temperature, row.top_p, row.min_p, row.top_k,
            row.repetition_penalty, row.presence_penalty, row.frequency_penalty, row.num_logprobs,
            row.seed, row.counter,
            address_of(row.prompt, np.int32, "prompt") or 0, len(row.prompt), len(row.output),
            address_of(row.output, np.int32, "output") or 0,
            address_of(row.bias_ids, np.int32, "bias_ids") or 0, address_of(row.bias, np.float32, "bias") or 0,
            len(row.bias_ids), len(row.banned), address_of(row.banned, np.int32, "banned") or 0,
        )  # fmt: skip
        if not len(row.output) and not len(row.banned):
            self._filled[index] = row

    def _results(self, rows: Sequence[SamplingRow]) -> list[Sampled]:
        tokens = self._sampled[: len(rows), 0].tolist()
        if all(row.num_logprobs < 0 for row in rows):
            return [Sampled(token, 0.0, 0) for token in tokens]
        logprobs, ranks = self._sampled[:, 1].view(np.float32).tolist(), self._sampled[:, 2].tolist()
        found = []
        for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            count = min(max(row.num_logprobs, 0), self.vocab)
            ids, values = self._top_ids[index, :count].tolist(), self._top_logprobs[index, :count].tolist()
            found.append(Sampled(token, logprobs[index], ranks[index], tuple(zip(ids, values, strict=True))))
        return found
