"""Where kernel tests of the cuda targets run their launches: in the interpreter, or on the GPU that `on` names.

Comes in: launches on one flat memory. Goes out: that memory, changed. Must not know: operators, graphs.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import hypothesis
import numpy as np
import pytest

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.cuda.interpret import Interpreter, Launch
from llmc.builder.cuda.variant import FP8_SM, Variant

#: Of the memory that kernels share with the tests: pages that no test touches are never there.
MEMORY = 1 << 30
#: The architecture whose launches are interpreted.
INTERPRETED_SM = 90


class Gpu(Protocol):
    """What stands in the interpreter's place: `memory` u8 as the launches find and leave it, the architecture."""

    memory: np.ndarray
    sm: int

    def run(self, launches: Sequence[Launch], variants: Sequence[Variant]) -> None:
        """Runs them in order; `variants`: what each is compiled from."""


_gpus: list[Gpu] = []


@contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """Within, everything runs there and is compiled for it."""
    _gpus.append(gpu)
    try:
        yield
    finally:
        _gpus.pop()


@functools.cache
def interpreter() -> Interpreter:
    """One child for all tests of this process."""
    child = Interpreter(MEMORY)
    atexit.register(child.close)
    return child


def on_gpu() -> bool:
    """Whether a GPU computes."""
    return bool(_gpus)


def memory() -> np.ndarray:
    """What the launches work on."""
    return _gpus[-1].memory if _gpus else interpreter().memory


def architecture() -> int:
    """What launches are made for: 90 for sm_90."""
    return _gpus[-1].sm if _gpus else INTERPRETED_SM


def run(launches: Sequence[Launch], variants: Callable[[], Sequence[Variant]]) -> None:
    """Runs launches in order; `variants` is asked on a GPU alone: what each of them is compiled from. Where the GPU has
    no FP8 and one of them needs it, the test, or the example, is passed over.
    """
    if not _gpus:
        interpreter().run(launches)
        return
    gpu = _gpus[-1]
    try:
        wanted = variants()
    except UnsupportedError:
        if gpu.sm >= FP8_SM:
            raise
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(f"sm_{gpu.sm} has no FP8")
    gpu.run(launches, wanted)
