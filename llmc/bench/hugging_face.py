"""Hugging Face transformers as a peer: eager, float32, with its own KV cache.

Comes in: a checkpoint. Goes out: seconds. Must not know: plans.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

from llmc.bench.work import Work, prompt


def prepare() -> None:
    """Imports the libraries."""
    import torch  # noqa: F401  before the builder, which tells OpenMP to spare other processes: the peer runs as it comes
    import transformers  # noqa: F401

    from llmc.builder import reference  # noqa: F401


class Runner:
    """As in peer_main. Caches of a decode's context are kept, and copied for every run."""

    name = "transformers fp32 eager"

    def __init__(self, path: Path, threads: int) -> None:
        import torch

        from llmc.builder.checkpoint import open_checkpoint
        from llmc.builder.reference import load_reference

        torch.set_num_threads(threads)
        self._model = load_reference(open_checkpoint(path))
        self._vocab = self._model.config.get_text_config().vocab_size
        self._caches: dict[Work, Any] = {}

    def _prefill(self, batch: int, count: int) -> Any:
        import torch

        ids = torch.tensor([prompt(count, self._vocab).tolist()] * batch)
        return self._model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def run(self, work: Work, steps: int) -> float:
        """As in `System`."""
        import torch

        with torch.inference_mode():
            if work.kind == "prefill":
                start = time.perf_counter()
                self._prefill(1, work.context)
                return time.perf_counter() - start
            if work not in self._caches:
                self._caches[work] = self._prefill(work.batch, work.context)
            cache = copy.deepcopy(self._caches[work])
            tokens = torch.tensor([[token] for token in prompt(work.batch, self._vocab)])
            start = time.perf_counter()
            for _ in range(steps):
                cache = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            return (time.perf_counter() - start) / steps
