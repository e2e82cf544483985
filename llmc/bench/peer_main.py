"""A peer's process: `python -m llmc.bench.peer_main KIND PATH THREADS`. Loads a model, then times works.

Comes in: one work a line on stdin, as JSON. Goes out: one line of JSON each: the seconds, or what went wrong. Must not
know: llmc's engines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from llmc.artifacts.errors import LlmcError
from llmc.bench.peer import KINDS
from llmc.bench.work import Work


class Runner(Protocol):
    """A peer's library with a model in it; `name` tells the system and how its weights are stored."""

    name: str

    def run(self, work: Work, steps: int) -> float:
        """As `System.run`."""


def main(argv: list[str]) -> int:
    """Returns the exit code; the reason of a failure has gone out as an answer."""
    kind, path, threads = argv[1], Path(argv[2]), int(argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        module: Any = import_module(f"llmc.bench.{KINDS[kind]}")
        # A library is imported once a day; a model is loaded whenever a server starts.
        module.prepare()
        began = time.perf_counter()
        runner: Runner = module.Runner(path, threads)
        runner.run(Work("prefill", 1, 1), 1)
        answer(name=runner.name, load=time.perf_counter() - began)
        for line in sys.stdin:
            fields = json.loads(line)
            steps = fields.pop("steps")
            answer(seconds=runner.run(Work(**fields), steps))
    except LlmcError as error:
        answer(kind=type(error).__name__, error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stderr.flush()
    os._exit(code)  # not by way of libraries' own ends
