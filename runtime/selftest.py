"""Asks a finished engine directly, without a scheduler: for golden answers and for comparing logits.

Comes in: a plan, token ids. Goes out: logits, greedy tokens, findings. Must not know: requests, sampling, text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from llmc.artifacts.errors import PlanError
from llmc.artifacts.plan import Plan
from llmc.artifacts.schema import ShapeProfile
from llmc.artifacts.verify import Finding
from llmc.runtime.executor import Executor
from llmc.runtime.step import Chunk, StepBatch

GOLDEN = "golden.json"
#: Seconds that a step may take: nobody waits for an answer, and a plan larger than memory is read anew in each.
PATIENCE = 3600.0


def probe_blocks(profile: ShapeProfile) -> int:
    """KV blocks that a `Probe` takes."""
    return -(-profile.max_seq_len // profile.block_size)


class Probe:
    """An executor with blocks for one sequence of full length, or several short ones; use it in a `with`. Raises
    LlmcError for a plan that does not load.
    """

    def __init__(self, plan: Plan | Path, *, threads: int | None = None) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan.open(plan)
        profile = self.plan.manifest.profile
        count = probe_blocks(profile)
        self._executor = Executor(self.plan, threads=threads, num_blocks=count, step_timeout=PATIENCE)
        self._blocks = array("i", range(count))
        #: The largest step whose every token may have its logits taken.
        self.max_chunk = min(profile.max_num_batched_tokens, profile.max_num_seqs)

    def step(self, ids: Sequence[int], start: int, rows: int) -> np.ndarray:
        """Runs tokens from position `start` on; the last `rows` logits, f32[rows, vocab], valid until the next step."""
        used = -(-(start + len(ids)) // self.plan.manifest.profile.block_size)
        return self._executor.run(StepBatch([Chunk(array("i", ids), start, self._blocks[:used], rows, 0)]))

    def pieces(self, ids: Sequence[int], chunk: int | None = None) -> Iterator[np.ndarray]:
        """The logits behind the tokens, f32[R, vocab] of each step in order, valid until the next; `chunk` tokens a
        step.
        """
        size = min(chunk or self.max_chunk, self.max_chunk)
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            yield self.step(piece, start, len(piece))

    def logits(self, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
        """f32[T, vocab]: all of them."""
        return np.concatenate([piece.copy() for piece in self.pieces(ids, chunk)])

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The `count` tokens that follow each prompt, each the first with the highest logit; no end token ends them.

        As many at a time as there are blocks for: an answer does not depend on its company.
        """
        answers: list[list[int]] = []
        while len(answers) < len(prompts):
            answers += self._greedy_together(self._fitting(prompts[len(answers) :], count), count)
        return answers

    def _fitting(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[Sequence[int], array[int]]]:
        """The first of the prompts, one at least, each with blocks of its own for its tokens and the answer's."""
        profile = self.plan.manifest.profile
        chosen: list[tuple[Sequence[int], array[int]]] = []
        first = 0
        for ids in prompts[: min(profile.max_num_seqs, profile.max_num_batched_tokens)]:
            last = first + -(-(len(ids) + count) // profile.block_size)
            if chosen and last > len(self._blocks):
                break
            chosen.append((ids, self._blocks[first:last]))
            first = last
        return chosen

    def _greedy_together(self, work: Sequence[tuple[Sequence[int], array[int]]], count: int) -> list[list[int]]:
        size = self.plan.manifest.profile.max_num_batched_tokens
        answers: list[list[int]] = []
        for slot, (ids, blocks) in enumerate(work):
            for start in range(0, len(ids), size):
                chunk = Chunk(array("i", ids[start : start + size]), start, blocks, 1, slot)
                last = self._executor.run(StepBatch([chunk]))
            answers.append([int(last[0].argmax())])
        for _ in range(count - 1):
            chunks = [
                Chunk(array("i", answer[-1:]), len(ids) + len(answer) - 1, blocks, 1, slot)
                for slot, ((ids, blocks), answer) in enumerate(zip(work, answers, strict=True))
            ]
            best = self._executor.run(StepBatch(chunks)).argmax(-1)
            for answer, token in zip(answers, best, strict=True):
                answer.append(int(token))
        return answers

    def close(self) -> None:
        """Ends the ranks."""
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_golden(path: Path) -> list[Finding]:
    """Answers the plan's golden prompts again: the same tokens as when it was built, or what differs."""
    plan = Plan.open(path)
    if GOLDEN not in plan:
        raise PlanError(
            f"{path}: it was built without a self test, for timing: it has no golden answers; build it again"
        )
    golden = json.loads(bytes(plan.section(GOLDEN)))
    findings = []
    with Probe(plan) as probe:
        answers = probe.greedy([prompt["ids"] for prompt in golden["prompts"]], golden["tokens"])
    for number, (prompt, have) in enumerate(zip(golden["prompts"], answers, strict=True)):
        subject, want = f"golden prompt {number} ({len(prompt['ids'])} tokens)", prompt["engine_tokens"]
        if want is None:
            detail = "was built on a machine that could not run it: nothing to compare with"
            findings.append(Finding(subject, False, detail))
            continue
        same = sum(h == w for h, w in zip(have, prompt["hf_tokens"], strict=True))
        answer = "the same tokens as when it was built" if have == want else f"{have}, when it was built {want}"
        detail = f"{answer}; {same} of {len(have)} as Hugging Face at fp32"
        findings.append(Finding(subject, have == want, detail))
    return findings
