"""Another system on the same machine, in a process of its own, as a `System`.

Comes in: a peer's kind and its model's file. Goes out: seconds. Must not know: how the peer is driven (peer_main.py).

A process of its own keeps its threads, its allocator and its settings apart from llmc's, and its memory can be told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from llmc.artifacts import errors
from llmc.artifacts.errors import EnvironmentFault, LlmcError, UsageError
from llmc.bench.machine import Memory
from llmc.bench.work import Work

#: Kind -> the module with its `Runner(path, threads)`.
KINDS = {"transformers": "hugging_face", "llama.cpp": "llama_cpp", "openvino": "openvino", "vllm": "vllm"}
#: Kind -> the variable that names the Python it runs in, where that is not this one.
_INTERPRETERS = {"vllm": "LLMC_VLLM_PYTHON"}


def parse_peer(text: str, model: Path | None) -> tuple[str, Path]:
    """`kind=PATH` as kind and path; transformers may do without where the checkpoint is given as `model`."""
    kind, _, path = text.partition("=")
    if kind not in KINDS:
        raise UsageError(f"--against {text}: {kind!r} is not one of {', '.join(KINDS)}")
    if not path and (kind != "transformers" or model is None):
        option = ", or --model" if kind == "transformers" else ""
        raise UsageError(f"--against {text}: say which file it loads, --against {kind}=PATH{option}")
    found = Path(path) if path else model
    assert found is not None
    if not found.exists():
        raise UsageError(f"--against {text}: {found} does not exist")
    return kind, found


class PeerSystem:
    """The running peer. Raises LlmcError, as the peer's process words it, where it cannot load or run."""

    #: Like a rank's it is an interpreter with the model, its cache and its threads; handing out steps is a few lines.
    processes = "its one process"

    def __init__(self, kind: str, path: Path, threads: int) -> None:
        self._kind = kind
        python = os.environ.get(_INTERPRETERS.get(kind, "")) or sys.executable
        command = [python, "-P", "-m", "llmc.bench.peer_main", kind, str(path), str(threads)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise EnvironmentFault(f"{kind}: {python} cannot be run: {error.strerror}{self._python()}") from error
        answer = self._answer()
        self.name, self.load = str(answer["name"]), float(str(answer["load"]))

    def _python(self) -> str:
        variable = _INTERPRETERS.get(self._kind)
        return f"; {variable} must name a Python that has {self._kind} and llmc" if variable else ""

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EnvironmentFault(f"{self._kind}: its process ended with code {code}{self._python()}")
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, str(answer["kind"]), EnvironmentFault)
            raise (kind if issubclass(kind, LlmcError) else EnvironmentFault)(f"{self._kind}: {answer['error']}")
        return answer

    def run(self, work: Work, steps: int) -> float:
        """As in `System`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asdict(work), "steps": steps}) + "\n")
        self._process.stdin.flush()
        return float(str(self._answer()["seconds"]))

    def memory(self) -> Memory:
        """Of its process."""
        return Memory.of([self._process.pid])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def peer(kind: str, path: Path, threads: int) -> Iterator[PeerSystem]:
    """The peer with its model loaded, on so many threads."""
    system = PeerSystem(kind, path, threads)
    try:
        yield system
    finally:
        system.close()
