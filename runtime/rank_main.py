"""A rank's process: `python -m llmc.runtime.rank_main FD`. Maps its share of a plan, then runs steps.

Comes in: over the socket FD, one `RankConfig` as JSON, then messages: STEP and the counts of a step, which itself is in
shared memory, or COPY and what moves between the KV pool and host memory.
Goes out: one datagram an answer: READY, DONE, or FAILED and why. Must not know: requests, scheduling, plan format.
Standard library and numpy only: this import is on the way to the first token.

It ends when the socket does, and the kernel kills it when its parent dies.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, LlmcError
from llmc.runtime.host_places import HostPlaces
from llmc.runtime.machine import die_with
from llmc.runtime.native import Engine, Library, RankFailure, RankMemory, StepArrays, StepRefused
from llmc.runtime.step import Copies
from llmc.runtime.step_memory import COUNTS, StepLayout, StepMemory

READY, DONE, FAILED = b"R", b"D", b"F"
STEP, COPY = b"S", b"C"
#: Largest datagram either way.
MAX_DATAGRAM = 1 << 16
_MAX_REASON = 4000  # characters; each takes up to 12 bytes in JSON
_MAP_NORESERVE = 0x4000
_Span = tuple[int, int]  # offset and size in the plan's file, in bytes


@dataclass(frozen=True)
class RankConfig:
    """All that a rank is told. `parent` is the process that must be its parent still; descriptors are inherited."""

    rank: int
    tp: int
    threads: int
    parent: int
    plan: str
    plan_fd: int
    memory_fd: int
    code: _Span
    weights: _Span
    shared: _Span
    arena_bytes: int
    kv_bytes: int
    num_blocks: int
    state_bytes: int
    num_slots: int
    host_blocks: int
    host_states: int
    #: The file of `HostPlaces`, and each rank's bytes of a block.
    host_fd: int
    host_sizes: list[int]
    layout: StepLayout
    #: Of the plan's target: cpu, cuda or tensorrt.
    kind: str = "cpu"
    #: Whether weights stay in the plan's file.
    mmap: bool = True

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankConfig:
        """From JSON."""
        fields = json.loads(data)
        return cls(**{**fields, "layout": StepLayout(**fields["layout"])})


def failure(kind: str, message: str) -> bytes:
    """The datagram that says why a rank cannot go on: `kind` is an error class's name."""
    return FAILED + json.dumps([kind, message[:_MAX_REASON]]).encode()


def _map_file(descriptor: int, span: _Span) -> np.ndarray:
    """u8[size]: a section of the plan, read from the disk now: the first step should not wait for it, nor time out over
    it. Sections start on page boundaries.
    """
    offset, size = span
    if size == 0:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ, offset=offset), np.uint8)


def _allocate(size: int, what: str) -> np.ndarray:
    """u8[size] of zeros that take memory only when touched, in huge pages where the kernel gives them: blocks of the
    cache lie anywhere, and each small page costs a walk of the page table.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        data = mmap.mmap(-1, max(size, 1), flags=flags)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"cannot allocate {size} bytes for the {what}: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        data.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(data, np.uint8)


def _read_file(descriptor: int, span: _Span) -> np.ndarray:
    """u8[size]: a section of the plan in memory of huge pages, which are read faster than a file's small ones."""
    offset, size = span
    data = _allocate(size, "weights")[:size]
    done = 0
    while done < size:
        count = os.preadv(descriptor, [data.data[done:]], offset + done)
        if count == 0:
            raise EnvironmentFault(f"the plan's file ends {size - done} bytes too early: it changed while it was read")
        done += count
    return data


class _Host:
    """A rank's memory for blocks and states that are out of the pool: rows of the pool's size, in places by number. Of
    the blocks' memory the core maps the same.
    """

    def __init__(self, config: RankConfig, pool: np.ndarray, states: np.ndarray) -> None:
        blocks = HostPlaces(config.host_sizes, config.host_blocks, config.host_fd).rows[config.rank]
        held = _rows(states, config.num_slots)
        size = held.shape[1]
        places = _allocate(config.host_states * size, "states in host memory")[: config.host_states * size]
        self._rows = [(_rows(pool, config.num_blocks), blocks), (held, places.reshape(config.host_states, size))]

    def copy(self, copies: Copies) -> None:
        """Out first, then in."""
        for (inside, outside), pairs in zip(self._rows, (copies.blocks_out, copies.states_out), strict=True):
            for number, place in pairs:
                outside[place] = inside[number]
        for (inside, outside), pairs in zip(self._rows, (copies.blocks_in, copies.states_in), strict=True):
            for number, place in pairs:
                inside[number] = outside[place]


def _rows(pool: np.ndarray, count: int) -> np.ndarray:
    """u8[count, bytes] of a pool."""
    size = pool.size // count
    return pool[: count * size].reshape(count, size)


def _load(config: RankConfig) -> tuple[Engine, StepMemory, _Host]:
    memory = StepMemory(config.layout, config.memory_fd)
    code = _map_file(config.plan_fd, config.code)
    library = Library(code.data, f"{config.plan}: code of rank {config.rank}")
    kv = _allocate(config.kv_bytes, "KV pool")[: config.kv_bytes]
    state = _allocate(config.state_bytes, "recurrent states")[: config.state_bytes]
    engine = library.create(
        RankMemory(
            rank=config.rank,
            tp=config.tp,
            threads=config.threads,
            weights=(_map_file if config.mmap else _read_file)(config.plan_fd, config.weights),
            shared=_map_file(config.plan_fd, config.shared),
            arena=_allocate(config.arena_bytes, "activations"),
            kv=kv,
            num_blocks=config.num_blocks,
            comm=memory.comm if config.layout.comm_bytes else None,
            state=state,
            num_slots=config.num_slots,
        )
    )
    return engine, memory, _Host(config, kv, state)


class _Runner(Protocol):
    """What runs steps."""

    def run(self, step: StepArrays, stamps: np.ndarray | None = None) -> None:
        """Fills this rank's columns of the logits."""


class _Mover(Protocol):
    """What moves blocks and states."""

    def copy(self, copies: Copies) -> None:
        """Out first, then in."""


def _open(config: RankConfig) -> tuple[_Runner, StepMemory, _Mover]:
    """The rank that the plan's target asks for."""
    if config.kind == "cuda":
        from llmc.runtime.cuda.engine import load  # imports what only a GPU's rank needs

        engine, memory = load(config)
        return engine, memory, engine
    if config.kind == "tensorrt":
        from llmc.runtime.cuda.trt_engine import load as load_tensorrt

        rank, memory = load_tensorrt(config)
        return rank, memory, rank
    return _load(config)


def _serve(sock: socket.socket, engine: _Runner, memory: StepMemory, host: _Mover, rank: int) -> None:
    stamps = memory.stamps[rank] if memory.layout.stamps else None
    sock.send(READY)
    while message := sock.recv(MAX_DATAGRAM):
        if message[:1] == COPY:
            host.copy(Copies.decode(message[1:]))
        else:
            engine.run(memory.arrays(*COUNTS.unpack(message[1:])), stamps)
        sock.send(DONE)


def main(argv: list[str]) -> int:
    """The exit code is for whoever looks at the process; the reason has gone over the socket."""
    # Whoever wants the server to stop tells its front end; a signal to the whole group must not end a step half way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(argv[1]))
    data = sock.recv(MAX_DATAGRAM)
    if not data:
        return 0
    config = RankConfig.decode(data)
    try:
        die_with(config.parent)
        engine, memory, host = _open(config)
        _serve(sock, engine, memory, host, config.rank)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # nobody is there to answer to
    except (LlmcError, StepRefused, RankFailure) as error:
        _report(sock, failure(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        _report(sock, failure(type(error).__name__, f"rank {config.rank}: {error!r}; a traceback is in the log"))
        raise
    return 0


def _report(sock: socket.socket, reason: bytes) -> None:
    # When several ranks fail the first answer decides, and nobody may be left to read the others.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.send(reason)


if __name__ == "__main__":
    code = main(sys.argv)
    # Not by way of the interpreter's end: the engine's threads may still run.
    sys.stderr.flush()
    os._exit(code)
