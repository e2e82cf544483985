"""Asks a finished engine directly, one sequence and no scheduler: for golden answers and for comparing logits.

Comes in: a plan, token ids. Goes out: logits, greedy tokens, findings. Must not know: requests, sampling, text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from llmc.artifacts.plan import Plan
from llmc.artifacts.verify import Finding
from llmc.runtime.executor import Executor
from llmc.runtime.step import Chunk, StepBatch

GOLDEN = "golden.json"
#: Seconds that a step may take: nobody waits for an answer, and a plan larger than memory is read anew in each.
PATIENCE = 3600.0


class Probe:
    """An executor with blocks for one sequence; use it in a `with`. Raises LlmcError for a plan that does not load."""

    def __init__(self, plan: Plan | Path, *, threads: int | None = None) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan.open(plan)
        profile = self.plan.manifest.profile
        count = -(-profile.max_seq_len // profile.block_size)
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

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """f32[vocab]: the logits behind the last token, in steps as large as the profile allows."""
        size = self.plan.manifest.profile.max_num_batched_tokens
        for start in range(0, len(ids), size):
            last = self.step(ids[start : start + size], start, 1)
        return last[0]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, each the first with the highest logit; it does not stop at an end token."""
        tokens = [int(self.prefill(ids).argmax())]
        while len(tokens) < count:
            start = len(ids) + len(tokens) - 1
            tokens.append(int(self.step(tokens[-1:], start, 1)[0].argmax()))
        return tokens

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
    golden = json.loads(bytes(plan.section(GOLDEN)))
    findings = []
    with Probe(plan) as probe:
        for number, prompt in enumerate(golden["prompts"]):
            subject = f"golden prompt {number} ({len(prompt['ids'])} tokens)"
            have, want = probe.greedy(prompt["ids"], golden["tokens"]), prompt["engine_tokens"]
            if want is None:
                detail = "was built on a machine that could not run it: nothing to compare with"
                findings.append(Finding(subject, False, detail))
                continue
            same = sum(h == w for h, w in zip(have, prompt["hf_tokens"], strict=True))
            answer = "the same tokens as when it was built" if have == want else f"{have}, when it was built {want}"
            detail = f"{answer}; {same} of {len(have)} as Hugging Face at fp32"
            findings.append(Finding(subject, have == want, detail))
    return findings
