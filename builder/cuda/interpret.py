"""Runs launches of Triton kernels on memory of this machine, without a GPU: what kernel tests and the whole-program
executor stand on.

Comes in: `Launch`es, whose pointers are `Address`es into one flat memory. Goes out: that memory, changed. Must not
know: graphs, operators, Triton (which is imported only by the child process, `interpret_worker`).

Interpreting and compiling cannot share a process, as Triton decides at import: a child interprets. It lives as long as
its `Interpreter`, so that imports are paid once, and shares the memory with it, so that no array is copied.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO

import numpy as np

from llmc.plugins.cuda.call import TRITON_TYPES, Arg, CudaCall

#: Before every message in both directions: its length in bytes.
FRAME = struct.Struct("<Q")


class InterpretError(Exception):
    """A kernel did what it must not do: it raised, or touched memory outside its launch's addresses."""


@dataclass(frozen=True)
class Address:
    """A pointer to elements of `dtype` at `offset` bytes of the memory. The launch may touch `nbytes` from there on."""

    offset: int
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Launch:
    """`kernel`, `source`, `constexprs` as in `CudaCall`. An int in `args` is an i32, a float an fp32."""

    kernel: str
    args: Mapping[str, Address | int | float]
    constexprs: Mapping[str, int | float | bool | str | None]
    grid: tuple[int, int, int]
    source: str | None = None


def resolve(call: CudaCall, value: Callable[[Arg], Address | int | float], symbols: Mapping[str, int]) -> Launch:
    """The launch of a call: `value` gives each argument, `symbols` the numbers that the grid depends on."""
    sizes = [sum(product.value(symbols) for product in axis) for axis in call.grid]
    x, y, z = [*sizes, 1, 1, 1][:3]
    arguments = {name: value(arg) for name, arg in call.args.items()}
    return Launch(call.kernel, arguments, call.constexprs, (x, y, z), call.source)


class Interpreter:
    """`memory` u8[nbytes] is shared with the child; pages that nobody touches cost nothing. A context manager."""

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("llmc-interpreter")
        try:
            os.ftruncate(descriptor, nbytes)
            self.memory = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "llmc.builder.cuda.interpret_worker", str(descriptor), str(nbytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
                env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        finally:
            os.close(descriptor)

    def run(self, launches: Sequence[Launch]) -> None:
        """Runs them in order. Raises InterpretError with the kernel's name; the memory is then as far as it came."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            send(self._child.stdin, json.dumps([asdict(launch) for launch in launches]).encode())
            answer = receive(self._child.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise InterpretError(f"the interpreting process ended with {self._child.wait()}")
        if answer:
            raise InterpretError(answer.decode())

    def close(self) -> None:
        """Ends the child."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def send(stream: IO[bytes], message: bytes) -> None:
    """Writes one message."""
    stream.write(FRAME.pack(len(message)) + message)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Reads one message; None where the stream has ended."""
    head = stream.read(FRAME.size)
    return stream.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else None


def pointer_type(dtype: str) -> str:
    """What Triton calls a pointer to elements of `dtype`."""
    return f"*{TRITON_TYPES[dtype]}"
