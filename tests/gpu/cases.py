"""Tiny models of each kind on an executor: what the tests of engines on a GPU share with those that record them.

Comes in: a folder, a family, options of a build; steps. Goes out: plans, logits, tokens. Must not know: which machine
runs them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import llmc
from llmc.artifacts.plan import Plan
from llmc.artifacts.sampler_params import GREEDY
from llmc.plugins.sampler import reference
from llmc.runtime.executor import Executor
from llmc.runtime.native_sampler import SamplingRow
from llmc.runtime.sampling import params_of
from llmc.runtime.step import Chunk, Copies, StepBatch
from llmc.tiny_model import tiny_model
from tests.models import save_checkpoint

Steps = Sequence[Sequence[int]]

#: How many tokens each sequence has in each step: a prefill and a chunk beside it, decodes, a decode alone.
SHORT: Steps = ((5, 2), (1, 1), (1, 1), (1, 0))
#: Contexts of 612, 540 and 20 tokens, several parts of attention; decodes of three sequences, which are padded to four.
LONG: Steps = ((400, 0, 20), (212, 300, 0), (0, 240, 0), (1, 1, 1), (1, 1, 1))
#: Decodes follow a prefill, and each sequence has the state of a recurrence.
MIXED: Steps = ((17, 2, 3), (1, 1, 1), (1, 4, 1), (1, 1, 1))


@dataclass(frozen=True)
class Case:
    """A model's family and sizes, how it is built, what is run. `bound`: see BOUNDS of tests/unit/cuda."""

    family: str
    steps: Steps
    precision: str = "bf16"
    sizes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fp8(self) -> bool:
        """Whether a GPU needs FP8 for it."""
        return self.precision == "fp8" or self.options.get("kv_dtype") == "fp8"


#: Families whose sizes `tests.models` does not say.
UNSIZED = ("mixtral",)
_LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
_LONG = {**_LLAMA, "max_position_embeddings": 1024}
CASES = {
    "bf16": Case("llama", SHORT, sizes=_LLAMA),
    "fp8": Case("llama", SHORT, "fp8", sizes=_LLAMA, options={"fp8_activations": "token"}),
    "long contexts": Case("llama", LONG, sizes=_LONG),
    "fp8 cache": Case("llama", LONG, sizes=_LONG, options={"kv_dtype": "fp8"}),
    "experts": Case("mixtral", MIXED),
    "latent attention": Case("deepseek_v3", MIXED),
    "recurrence beside attention": Case("falcon_h1", MIXED),
}


def checkpoint(folder: Path, case: Case) -> Path:
    """Made once a folder."""
    path = folder / "-".join([case.family, *map(str, case.sizes.values())])
    if not path.exists():
        model = tiny_model(case.family, **case.sizes) if case.family in UNSIZED else None
        save_checkpoint(path, case.family, model=model, **case.sizes)
    return path


def built(folder: Path, case: Case, target: str, tp: int = 1) -> Path:
    """The plan, made once a folder."""
    model = checkpoint(folder, case)
    options = {"precision": case.precision, "tp": tp, **case.options}
    plan = folder / f"{model.name}-{target.replace(':', '-')}-{'-'.join(map(str, options.values()))}.plan"
    if not plan.exists():
        llmc.build(model, plan, target=target, evaluate=False, **options)
    return plan


class Run:
    """Sequences that grow on an executor; each has blocks for the longest one. Close it, or use it in a `with`."""

    def __init__(self, path: Path, steps: Steps, *, timed: bool = False) -> None:
        plan = Plan.open(path)
        size = plan.manifest.profile.block_size
        self.each = -(-max(map(sum, zip(*steps, strict=True))) // size) + 1
        self.count = len(steps[0])
        blocks = self.each * (self.count + 1)  # one sequence's are free
        self.executor = Executor(plan, num_blocks=blocks, host_bytes=1 << 24, timed=timed)
        self.tables = [array("i", range(n * self.each, (n + 1) * self.each)) for n in range(self.count)]
        self.slots = list(range(self.count))
        self.lengths = [0] * self.count
        self._vocab = plan.manifest.model.vocab_size
        self._rng = np.random.default_rng(0)

    def batch(self, counts: Sequence[int]) -> StepBatch[Chunk]:
        """The next so many tokens of each sequence; the same for every run."""
        chunks = []
        for n, count in enumerate(counts):
            if count:
                tokens = array("i", self._rng.integers(3, self._vocab, count).tolist())
                chunks.append(Chunk(tokens, self.lengths[n], self.tables[n], 1, self.slots[n]))
                self.lengths[n] += count
        return StepBatch(chunks)

    def step(self, counts: Sequence[int]) -> np.ndarray:
        """Logits of each sequence's last token."""
        return np.array(self.executor.run(self.batch(counts)))

    def move(self, sequence: int) -> None:
        """A sequence's blocks and state go out to host memory, and come in elsewhere."""
        old, new = self.tables[sequence], array("i", range(self.count * self.each, (self.count + 1) * self.each))
        places = range(self.each)
        out, back = list(zip(old, places, strict=True)), list(zip(new, places, strict=True))
        states = self.executor.host_states > 0
        slot = self.count
        self.executor.copy(
            Copies(
                out if self.executor.host_blocks else [], [(sequence, 0)] if states else [],
                back if self.executor.host_blocks else [], [(slot, 0)] if states else [],
            )
        )  # fmt: skip
        self.tables[sequence], self.slots[sequence] = new, slot

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()


def logits(path: Path, steps: Steps, *, timed: bool = False, moved: bool = False) -> list[np.ndarray]:
    """Of each step. A timed executor launches one by one, any other replays decodes. `moved`: before the last step the
    first sequence is copied out and in.
    """
    with Run(path, steps, timed=timed) as run:
        made = [run.step(counts) for counts in steps[:-1]]
        if moved:
            run.move(0)
        return [*made, run.step(steps[-1])]


#: One row of each kind that a GPU chooses, and one that it leaves to the host.
ROWS = (
    SamplingRow(0.0),
    SamplingRow(0.8, top_p=0.9, top_k=40, seed=4, counter=7),
    SamplingRow(1.3, min_p=0.02, seed=2**63 + 5),
    SamplingRow(0.7, repetition_penalty=1.1),
)


@cache
def _params() -> np.ndarray:
    return np.array([params_of(row) for row in ROWS], np.int32)


def chosen(path: Path) -> tuple[list[int], list[int], np.ndarray, np.ndarray]:
    """The tokens that the GPU chooses in a decode of `ROWS`, and those that the host would; the last row's logits in
    that step and in one whose rows are all the host's. All are greedy in a first step, which is replayed then.
    """
    steps = ((9, 3, 2, 7), (1, 1, 1, 1))
    with Run(path, steps) as run:
        run.step(steps[0])
        batch = run.batch(steps[1])
        want = np.array(run.executor.run(batch))
        run.executor.run(batch, np.array([GREEDY] * len(ROWS), np.int32))
        greedy = run.executor.tokens.tolist()
        last = np.array(run.executor.run(batch, _params()))[-1]
        have = run.executor.tokens.tolist()[:-1]
    expected = [reference.sample(*pair).token for pair in zip(want, ROWS, strict=True)][:-1]
    return [*greedy, *have], [*want.argmax(axis=1).tolist(), *expected], last, want[-1]


def main() -> None:
    """Runs everything of plans that are named after their case, whatever comes out: for drivers that only record."""
    for path in map(Path, sys.argv[1:]):
        steps = CASES[path.stem.replace("-", " ")].steps
        logits(path, steps, moved=True)
        logits(path, steps, timed=True)
        chosen(path)


if __name__ == "__main__":
    main()
