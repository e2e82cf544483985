"""OpenVINO GenAI as a peer, on the GGUF file that it reads itself, by continuous batching with its prefix cache off.

Comes in: a GGUF file. Goes out: seconds. Must not know: plans.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, EnvironmentFault
from llmc.bench.work import Work, prompt


def prepare() -> None:
    """Imports the library. Raises EnvironmentFault where it is missing."""
    if find_spec("openvino_genai") is None:
        raise EnvironmentFault("openvino-genai is not installed; `pip install 'llmc[bench]'` brings it")
    import openvino_genai  # noqa: F401


class Runner:
    """As in peer_main. It has no call for one step: a decode is a generation less its time to the first token."""

    def __init__(self, path: Path, threads: int) -> None:
        import openvino_genai as genai
        from gguf import GGUFReader

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # repeats would find their prompt in it
        try:
            self._pipe = genai.LLMPipeline(str(path), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: OpenVINO cannot load it: {str(error).strip().splitlines()[-1]}") from error
        embedding = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
        self._vocab = int(embedding.shape[1])
        self.name = f"OpenVINO {embedding.tensor_type.name}"

    def _generate(self, batch: int, context: int, count: int) -> tuple[float, float]:
        """Seconds of generating `count` tokens behind each prompt, and of those until the first."""
        import openvino
        import openvino_genai as genai

        config: Any = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        config.apply_chat_template = False
        ids = np.tile(np.asarray(prompt(context, self._vocab), np.int64), (batch, 1))
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        result = self._pipe.generate(inputs, config)
        return time.perf_counter() - start, result.perf_metrics.get_ttft().mean / 1000

    def run(self, work: Work, steps: int) -> float:
        """As in `System`."""
        if work.kind == "prefill":
            return self._generate(1, work.context, 1)[0]
        seconds, first = self._generate(work.batch, work.context, steps + 1)
        return (seconds - first) / steps
