"""Compiled code as Python calls it: the ctypes mirror of plugins/cpu/abi.h.

Comes in: the bytes of a rank's shared object, numpy arrays. Goes out: `Library`, `Engine`, and the `Sampler` of
native_sampler.py. Must not know: plans, schedulers, messages. Standard library and numpy only. The calls release the
interpreter lock.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.runtime.native_sampler import Sampler, address_of

ABI_VERSION = 4
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
        return float(rate(address_of(data, np.uint8, "data"), len(data), threads))

    def product_rate(self, products: int, rounds: int, threads: int) -> float:
        """Operations a second of products of one kind (plugins/cpu/products.py) that wait for nothing, `rounds` times
        by each thread. Raises PlanError for a kind that the level has no instructions for.
        """
        rate = self._dll.llmc_product_rate
        rate.restype, rate.argtypes = c_double, [c_int32, c_int64, c_int32]
        found = float(rate(products, rounds, threads))
        if not found:
            raise PlanError(f"{self.name}: its code has no instructions for products of kind {products}")
        return found

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
            setattr(struct, name, address_of(getattr(memory, name), np.uint8, name))
        struct.num_blocks, struct.num_slots = memory.num_blocks, memory.num_slots
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        handle = self._dll.llmc_create(ctypes.byref(struct), message, _MESSAGE_BYTES)
        if not handle:
            raise EnvironmentFault(f"{self.name}: {message.value.decode(errors='replace')}")
        return Engine(self._dll, handle, memory)

    def abort(self, comm: np.ndarray) -> None:
        """Makes every rank that waits in `comm`, or will wait, give up with RankFailure."""
        self._dll.llmc_abort(address_of(comm, np.uint8, "comm"))


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
            setattr(struct, name, address_of(getattr(step, name), np.int32, name))
        struct.logits = address_of(step.logits, np.float32, "logits")
        struct.stamps = address_of(stamps, np.int64, "stamps")
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
