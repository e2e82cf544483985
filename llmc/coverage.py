"""Which model types compile and compute what Hugging Face computes: measured, and as the record that comes with llmc.

Comes in: model types of transformers' causal-LM mapping. Goes out: a `Coverage` each; `Record`, read from models.json.
Must not know: any model family, how results are printed.

A check takes a tiny random model from its checkpoint to an fp32 engine, runs a ragged batch of prompts together and
then 16 greedy decode steps, and holds each step's logits against the stock model with eager attention. It runs in a
process of its own (`python -m llmc.coverage`), so that a crash or a hang is a result like others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, LlmcError, UsageError
from llmc.builder.cpu.cache import default_folder

RECORD = Path(__file__).with_name("models.json")

WORKS, DIFFERS, REFUSED, FAILED, NO_MODEL = "works", "differs", "refused", "failed", "no model"
#: What each status means.
STATUSES = {
    WORKS: "builds, and matches Hugging Face",
    DIFFERS: "builds, and computes something else",
    REFUSED: "refused with an error that says why",
    FAILED: "a defect: the build or the engine breaks",
    NO_MODEL: "transformers cannot run a small model of it as a causal language model",
}

#: Tokens of the prompts that are computed together; windows of the tiny models are shorter than the longest.
LENGTHS = (13, 1, 29, 6)
DECODED = 16
COSINE = 0.9999
TIMEOUT = 300.0
#: One code variant for all steps: what is checked does not depend on how steps are divided.
_PROFILE = "token_ranges: [{min: 1, opt: 16, max: 64}]\nmax_num_seqs: 8\nmax_seq_len: 64\nblock_size: 16\n"


@dataclass(frozen=True)
class Coverage:
    """One model type's result. `cosine` is the worst over prompts and steps, `greedy` whether all tokens are the same;
    launches are kernels a layer in one step: of an eager runner, and compiled. None where it did not come so far.
    """

    model_type: str
    status: str
    architecture: str = ""
    cosine: float | None = None
    greedy: bool | None = None
    launches_traced: float | None = None
    launches_per_layer: float | None = None
    seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Record:
    """Results by model type, and the transformers release that they are of."""

    transformers: str
    models: tuple[Coverage, ...]

    @staticmethod
    def read(path: Path = RECORD) -> Record:
        """Raises EnvironmentFault where the installation lacks the file."""
        try:
            data = json.loads(path.read_text())
            return Record(data["transformers"], tuple(Coverage(**row) for row in data["models"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFault(
                f"{path}: the record of model types cannot be read ({error}); reinstall llmc"
            ) from error

    def write(self, path: Path) -> None:
        """One line a model type, in order of name."""
        rows = [
            json.dumps({k: v for k, v in dataclasses.asdict(row).items() if v not in (None, "") and k != "seconds"})
            for row in sorted(self.models, key=lambda row: row.model_type)
        ]
        head = json.dumps(self.transformers)
        path.write_text(f'{{"transformers": {head}, "models": [\n' + ",\n".join(rows) + "\n]}\n")

    def select(self, names: Sequence[str]) -> tuple[Coverage, ...]:
        """The rows of these model types, all without names; raises UsageError for one that was not measured."""
        known = {row.model_type: row for row in self.models}
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{name!r} is not in the record of transformers {self.transformers}; `llmc models --check {name}` "
                    "measures it"
                )
        return tuple(known[name] for name in names) if names else self.models

    def updated(self, rows: Iterable[Coverage], transformers: str) -> Record:
        """The record with newer results; those of another transformers release are dropped."""
        old = {row.model_type: row for row in self.models} if transformers == self.transformers else {}
        merged = old | {row.model_type: row for row in rows}
        return Record(transformers, tuple(merged[name] for name in sorted(merged)))

    def summary(self) -> str:
        """What the README says of the record, in Markdown."""
        working = [f"`{row.model_type}`" for row in self.models if row.status == WORKS]
        others = [
            f"{count} {status} ({meaning})"
            for status, meaning in STATUSES.items()
            if status != WORKS and (count := sum(row.status == status for row in self.models))
        ]
        return (
            f"Of {len(self.models)} measured model types of transformers {self.transformers}'s causal-LM mapping, "
            f"{len(working)} compile and match Hugging Face: {', '.join(working)}.\n\n"
            f"The others: {'; '.join(others)}. `llmc models` prints the matrix, with launches a layer and reasons.\n"
        )


def model_types() -> list[str]:
    """Every model type that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# -- one check


def check_family(model_type: str) -> Coverage:
    """Builds a tiny model of the type and holds its engine against Hugging Face. Never raises for what it finds."""
    began = time.monotonic()

    def result(status: str, **facts: Any) -> Coverage:
        return Coverage(model_type, status, seconds=round(time.monotonic() - began, 1), **facts)

    from llmc.tiny_model import tiny_model

    try:
        model = tiny_model(model_type)
    except LlmcError as error:
        return result(NO_MODEL, reason=_one_line(error))
    architecture = type(model).__name__
    try:
        with tempfile.TemporaryDirectory(prefix="llmc-check-") as folder:
            return dataclasses.replace(_checked(model, Path(folder), model_type), seconds=result("").seconds)
    except EnvironmentFault as error:
        return result(FAILED, architecture=architecture, reason=_one_line(error))
    except LlmcError as error:
        return result(REFUSED, architecture=architecture, reason=_one_line(error))
    except Exception as error:
        return result(FAILED, architecture=architecture, reason=f"{type(error).__name__}: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _checked(model: Any, folder: Path, model_type: str) -> Coverage:
    from llmc.builder.build import BuildOptions, Progress, compile_plan
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.tiny_model import save_tiny

    plan = folder / "engine.plan"
    checkpoint = open_checkpoint(save_tiny(folder / "model", model))
    options = BuildOptions(precision="fp32", profile=_profile(folder), cxx=_quick_compiler())
    report = compile_plan(checkpoint, options, None, plan, Progress())
    prompts = [[5 + (17 * n + 37 * i) % 290 for i in range(length)] for n, length in enumerate(LENGTHS)]
    answers = decode_together(plan, prompts, DECODED)
    cosines, same = [], True
    for prompt, have in zip(prompts, answers, strict=True):
        tokens = have.argmax(-1).tolist()
        want = stock_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
        cosines.append(_cosine(want, have))
        same &= want.argmax(-1).tolist() == tokens
    worst = float(min(cosines))
    works = worst >= COSINE and same
    reason = "" if works else f"worst cosine {worst:.6f}, greedy tokens {'the same' if same else 'differ'}"
    return Coverage(
        model_type,
        WORKS if works else DIFFERS,
        architecture=type(model).__name__,
        cosine=round(worst, 7),
        greedy=same,
        launches_traced=round(report.launches_traced, 1),
        launches_per_layer=round(report.launches_compiled, 1),
        reason=reason,
    )


def _profile(folder: Path) -> str:
    path = folder / "check.yaml"
    path.write_text(_PROFILE)
    return str(path)


def _quick_compiler() -> str:
    """g++ that does not optimise: kernels have tests of their own, here it is the graph that is checked. It stands at
    one place, by which the cache knows its objects from those of other builds, and what all models share is compiled
    once.
    """
    folder = default_folder("compiler")
    path, aside = folder / "g++", folder / f"g++.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    aside.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    aside.chmod(0o755)
    aside.replace(path)  # other checks may run it at this moment
    return str(path)


def _cosine(want: np.ndarray, have: np.ndarray) -> float:
    """The worst over rows; NaN counts as -1."""
    want, have = want.astype(np.float64), have.astype(np.float64)
    lengths = np.linalg.norm(want, axis=-1) * np.linalg.norm(have, axis=-1)
    return float(np.nan_to_num((want * have).sum(-1) / lengths, nan=-1.0).min())


def stock_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """f32[T, V]: the stock model's logits behind each token, all computed at once."""
    import torch

    with torch.inference_mode():
        return np.asarray(model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy())


def decode_together(plan: Path, prompts: Sequence[Sequence[int]], steps: int) -> list[np.ndarray]:
    """Prompts in one step, then `steps` greedy steps with all of them: f32[steps + 1, V] for each prompt."""
    from llmc.artifacts.plan import Plan
    from llmc.runtime.executor import Executor
    from llmc.runtime.step import Chunk, StepBatch

    opened = Plan.open(plan, verify=False)
    profile = opened.manifest.profile
    each = -(-profile.max_seq_len // profile.block_size)
    # Block tables that are not in order, as in a pool that has been used for a while.
    tables = [array("i", [len(prompts) * b + n for b in reversed(range(each))]) for n in range(len(prompts))]
    pieces, starts = [array("i", prompt) for prompt in prompts], [0] * len(prompts)
    rows: list[np.ndarray] = []
    with Executor(opened, num_blocks=each * len(prompts)) as executor:
        for _ in range(steps + 1):
            chunks = [
                Chunk(tokens, start, table[: -(-(start + len(tokens)) // profile.block_size)], 1, slot)
                for slot, (tokens, start, table) in enumerate(zip(pieces, starts, tables, strict=True))
            ]
            logits = executor.run(StepBatch(chunks)).copy()
            rows.append(logits)
            starts = [start + len(tokens) for tokens, start in zip(pieces, starts, strict=True)]
            pieces = [array("i", [int(token)]) for token in logits.argmax(-1)]
    return [np.stack([logits[n] for logits in rows]) for n in range(len(prompts))]


# -- many checks, each guarded by a process


class _Worker:
    """A process that checks one type after another, and is replaced when it dies or hangs."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def check(self, model_type: str) -> Coverage:
        """The type's result; FAILED with the reason where the process ends or gives no answer in time."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llmc.coverage"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has died: that shows as the end of its output
            process.stdin.write(model_type + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._timeout)
        line = process.stdout.readline() if ready else ""
        if line:
            return Coverage(**json.loads(line))
        if ready:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self.close()
        ending = (
            f"the check's process ended with {process.returncode}" if ready else f"no answer in {self._timeout:g} s"
        )
        return Coverage(model_type, FAILED, seconds=None if ready else self._timeout, reason=ending)

    def close(self) -> None:
        """Ends the process and all that it started."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def check_families(
    names: Sequence[str], workers: int = 1, timeout: float = TIMEOUT, done: Callable[[Coverage], None] = lambda _: None
) -> list[Coverage]:
    """Results in the order of `names`; `done` is told each as it comes."""
    queue: SimpleQueue[str] = SimpleQueue()
    for name in names:
        queue.put(name)
    results: dict[str, Coverage] = {}
    lock = Lock()

    def work() -> None:
        worker = _Worker(timeout)
        try:
            while True:
                result = worker.check(queue.get_nowait())
                with lock:
                    results[result.model_type] = result
                    done(result)
        except Empty:
            pass
        finally:
            worker.close()

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    return [results[name] for name in names]


def _serve() -> None:
    """Reads model types from stdin, writes results to what stdout was when it began; what models print goes nowhere."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        answers.write(json.dumps(dataclasses.asdict(check_family(line.strip()))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
