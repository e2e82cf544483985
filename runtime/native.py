"""Compiled code as Python calls it: the ctypes mirror of plugins/cpu/abi.h.

Comes in: the bytes of a rank's shared object, numpy arrays. Goes out: `Library`, `Engine`, `Sampler`. Must not know:
plans, schedulers, messages. Standard library and numpy only. The calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, PlanError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

ABI_VERSION = 3
_MESSAGE_BYTES = 512


class RankStruct(ctypes.Structure):
    """llmc_rank."""

    _fields_ = [
        ("rank", c_int32),
        ("tp", c_int32),
        ("threads", c_int32),
        ("reserved", c_int32),
        ("weights", c_void_p),
        ("shared", c_void_p),
        ("arena", c_void_p),
        ("kv", c_void_p),
        ("num_blocks", c_int64),
        ("state", c_void_p),
        ("num_slots", c_int64),
        ("comm", c_void_p),
    ]


class StepStruct(ctypes.Structure):
    """llmc_step."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_rows", c_int32),
        ("block_table_stride", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
        ("state_slots", c_void_p),
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("stamps", c_void_p),
    ]


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


class StepRefused(RuntimeError):
    """llmc_run returned 1: a count of the step lies outside the compiled ranges."""


class RankFailure(RuntimeError):
    """llmc_run returned 2: another rank has died, hung or been told to abort. The group cannot go on."""


@dataclass(frozen=True)
class RankMemory:
    """What a rank keeps for life, as u8 arrays that start on 64-byte boundaries. `comm` None is for tp 1 only."""

    rank: int
    tp: int
    threads: int
    weights: np.ndarray
    shared: np.ndarray
    arena: np.ndarray
    kv: np.ndarray
    num_blocks: int
    comm: np.ndarray | None = None
    state: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    num_slots: int = 0


@dataclass(frozen=True)
class StepArrays:
    """One step; all i32 but `logits`, all C-contiguous. Shapes as in `llmc_step`: ids, positions [T], query_start
    [num_seqs+1], context_len, state_slots [num_seqs], block_tables [num_seqs, stride], rows [S], logits f32 [S, vocab].
    """

    ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    block_tables: np.ndarray
    state_slots: np.ndarray
    rows: np.ndarray
    logits: np.ndarray
    #: How a GPU is to choose tokens, i32[S, len(SAMPLER_FIELDS)], and where they go, i32[S]; None where it does not.
    sampler_params: np.ndarray | None = None
    tokens: np.ndarray | None = None


def _address(values: np.ndarray | array[int] | None, dtype: type, name: str) -> int | None:
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


class HostLibrary:
    """A shared object of a plan, loaded from bytes through an anonymous file: the sampler, and the machine's limits. It
    stays loaded for the process's life.
    """

    def __init__(self, code: bytes | memoryview, name: str = "llmc-code") -> None:
        """Raises PlanError for an ABI other than ABI_VERSION, EnvironmentFault where the code cannot be loaded."""
        self.name = name
        try:
            # The descriptor stays open: the loader knows libraries by path, and a reused number would find the old one.
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(code)
            self._dll = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        except OSError as error:
            raise EnvironmentFault(f"{name}: cannot load the compiled code ({len(code)} bytes): {error}") from error
        self._check_abi()
        self._declare()

    def _check_abi(self) -> None:
        try:
            self._dll.llmc_abi_version.restype = c_int32
            found = self._dll.llmc_abi_version()
        except AttributeError:
            raise PlanError(f"{self.name}: not an engine's code: it exports no llmc_abi_version") from None
        if found != ABI_VERSION:
            raise PlanError(
                f"{self.name}: compiled for ABI {found}, this runtime speaks ABI {ABI_VERSION}; "
                "rebuild the plan with this version of llmc, or run it with the version that built it"
            )

    def _declare(self) -> None:
        dll = self._dll
        dll.llmc_sample.restype = None
        dll.llmc_sample.argtypes = [
            c_void_p, c_int32, c_int32, c_void_p, c_void_p,
            c_void_p, c_void_p, c_int32, c_void_p, c_void_p,
        ]  # fmt: skip

    def read_rate(self, data: np.ndarray, threads: int) -> float:
        """Bytes a second of reading `data`, u8 from a 64-byte boundary on, once by `threads` threads."""
        rate = self._dll.llmc_read_rate
        rate.restype, rate.argtypes = c_double, [c_void_p, c_int64, c_int32]
        return float(rate(_address(data, np.uint8, "data"), len(data), threads))

    def multiply_rate(self, rounds: int, threads: int) -> float:
        """Floating-point operations a second of multiply-adds that wait for nothing, `rounds` times by each thread: of
        float32, or of bf16 in tiles where the engine multiplies in tiles.
        """
        rate = self._dll.llmc_multiply_rate
        rate.restype, rate.argtypes = c_double, [c_int64, c_int32]
        return float(rate(rounds, threads))

    def sampler(self, vocab: int, max_rows: int, max_logprobs: int, threads: int = 1) -> Sampler:
        """A sampler for up to `max_rows` rows a call and `max_logprobs` alternatives a row."""
        return Sampler(self._dll, vocab, max_rows, max_logprobs, threads)


class Library(HostLibrary):
    """A rank's shared object: an engine beside the sampler."""

    def _declare(self) -> None:
        super()._declare()
        dll = self._dll
        dll.llmc_create.restype, dll.llmc_create.argtypes = c_void_p, [POINTER(RankStruct), c_char_p, c_int32]
        dll.llmc_run.restype, dll.llmc_run.argtypes = c_int32, [c_void_p, POINTER(StepStruct)]
        dll.llmc_destroy.restype, dll.llmc_destroy.argtypes = None, [c_void_p]
        dll.llmc_abort.restype, dll.llmc_abort.argtypes = None, [c_void_p]

    def create(self, memory: RankMemory) -> Engine:
        """An engine that works in `memory`. Raises EnvironmentFault with the compiled code's own message."""
        if memory.tp > 1 and memory.comm is None:
            raise ValueError(f"tp={memory.tp} needs comm memory")
        struct = RankStruct(memory.rank, memory.tp, memory.threads)
        for name in ("weights", "shared", "arena", "kv", "state", "comm"):
            setattr(struct, name, _address(getattr(memory, name), np.uint8, name))
        struct.num_blocks, struct.num_slots = memory.num_blocks, memory.num_slots
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        handle = self._dll.llmc_create(ctypes.byref(struct), message, _MESSAGE_BYTES)
        if not handle:
            raise EnvironmentFault(f"{self.name}: {message.value.decode(errors='replace')}")
        return Engine(self._dll, handle, memory)

    def abort(self, comm: np.ndarray) -> None:
        """Makes every rank that waits in `comm`, or will wait, give up with RankFailure."""
        self._dll.llmc_abort(_address(comm, np.uint8, "comm"))


class Engine:
    """A rank ready to run steps. It keeps its memory alive; `close` joins its threads."""

    def __init__(self, dll: ctypes.CDLL, handle: int, memory: RankMemory) -> None:
        self._dll, self._handle, self._memory = dll, handle, memory

    def run(self, step: StepArrays, stamps: np.ndarray | None = None) -> None:
        """Runs one step and fills this rank's columns of `step.logits`. `stamps` i64[launches + 1] is filled with the
        nanosecond at which each launch began, and at which the last ended. Raises StepRefused or RankFailure.
        """
        struct = StepStruct(len(step.ids), len(step.context_len), len(step.rows), step.block_tables.shape[1])
        for name in ("ids", "positions", "query_start", "context_len", "block_tables", "state_slots", "rows"):
            setattr(struct, name, _address(getattr(step, name), np.int32, name))
        struct.logits = _address(step.logits, np.float32, "logits")
        struct.stamps = _address(stamps, np.int64, "stamps")
        code = self._dll.llmc_run(self._handle, ctypes.byref(struct))
        if code == 1:
            raise StepRefused(
                f"rank {self._memory.rank}: a step of {len(step.ids)} tokens, {len(step.context_len)} sequences and "
                f"{len(step.rows)} rows is outside the compiled ranges"
            )
        if code:
            raise RankFailure(
                f"rank {self._memory.rank} of {self._memory.tp}: another rank has failed or did not answer in time"
            )

    def close(self) -> None:
        """Destroys the engine; further calls do nothing."""
        if self._handle:
            self._dll.llmc_destroy(self._handle)
            self._handle = 0


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
        address = _address(logits, np.float32, "logits")
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
            _address(row.prompt, np.int32, "prompt") or 0, len(row.prompt), len(row.output),
            _address(row.output, np.int32, "output") or 0,
            _address(row.bias_ids, np.int32, "bias_ids") or 0, _address(row.bias, np.float32, "bias") or 0,
            len(row.bias_ids), len(row.banned), _address(row.banned, np.int32, "banned") or 0,
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
