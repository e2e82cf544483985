"""How ranks find one another and sum: NCCL is called as nccl.h says. The library here only keeps what it was told."""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.errors import EnvironmentFault
from llmc.builder.cuda.lower import COMM_BYTES
from llmc.runtime.cuda import nccl
from llmc.runtime.cuda.nccl import Communicator

STREAM: Any = SimpleNamespace(handle=0x50)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    target = tmp_path / "libnccl.so"
    source = Path(__file__).parent / "fake_nccl.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(target)], check=True)
    found = ctypes.CDLL(str(target))
    monkeypatch.setattr(nccl, "_library", lambda: found)
    return found


def test_all_ranks_take_the_identity_that_rank_0_made(library: ctypes.CDLL) -> None:
    comm = np.zeros(COMM_BYTES, np.uint8)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(Communicator, 1, 2, comm)  # waits for the first
        first = Communicator(0, 2, comm)
        ranks = [first, second.result(timeout=120)]
    for number, (rank, dtype, kind) in enumerate(zip(ranks, ("f32", "bf16"), (7, 9), strict=True)):
        rank.all_reduce(0x1234567890, (1 << 33) + number, dtype, STREAM)
        last = {name: ctypes.c_int.in_dll(library, f"last_{name}").value for name in ("rank", "type", "op")}
        assert last == {"rank": number, "type": kind, "op": 0}
        assert ctypes.c_void_p.in_dll(library, "last_buffer").value == 0x1234567890
        assert ctypes.c_size_t.in_dll(library, "last_count").value == (1 << 33) + number
        assert ctypes.c_void_p.in_dll(library, "last_stream").value == 0x50


def test_what_nccl_refuses_is_said_in_its_words(library: ctypes.CDLL) -> None:
    comm = np.zeros(COMM_BYTES, np.uint8)
    alone = Communicator(0, 1, comm)
    with pytest.raises(EnvironmentFault, match=r"NCCL: ncclAllReduce: invalid argument \(NCCL_DEBUG=INFO says more\)"):
        alone.all_reduce(0x10, 1, "f32", STREAM)


def test_tensorrt_gets_the_communicator_in_a_capsule(library: ctypes.CDLL) -> None:
    alone = Communicator(0, 1, np.zeros(COMM_BYTES, np.uint8))
    alone._handle = ctypes.c_void_p(0x1234567890)
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert read(alone.capsule(), None) == 0x1234567890


def test_a_machine_without_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nccl.ctypes, "CDLL", absent)
    with pytest.raises(EnvironmentFault, match=r"NCCL, .* is not there: pip install 'llmc\[cuda\]'"):
        nccl._library()
