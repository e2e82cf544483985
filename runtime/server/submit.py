"""From prompts to a group of sequences: every prompt `n` times, each answer with a seed of its own."""

from __future__ import annotations

import msgspec

from llmc.runtime.front import Group
from llmc.runtime.messages import Handling, SamplingParams
from llmc.runtime.params import RequestError, check_handling
from llmc.runtime.service import Service


def submit(
    service: Service, prompts: list[list[int]], params: SamplingParams, n: int, param: str, handling: Handling
) -> Group:
    """Starts `n` answers per prompt, those of a prompt next to each other; raises RequestError before any starts.

    The i-th answer to a prompt samples with seed + i, or n equal seeds would give n equal answers.
    """
    check_handling(handling, service.priorities)
    most = service.most_sequences
    if most is not None and len(prompts) * n > most:
        raise RequestError(
            f"the request starts {len(prompts) * n} answers; this server holds at most {most} at once, those that wait "
            "included (--max-num-seqs, --max-num-queued-reqs). Ask for fewer in one request",
            "n",
        )
    requests = []
    for prompt in prompts:
        for i in range(n):
            requests.append(service.text.request(prompt, _reseed(params, i), param))
    return service.front.submit(requests, handling)


def _reseed(params: SamplingParams, i: int) -> SamplingParams:
    if params.seed is None or i == 0:
        return params
    wrapped = (params.seed + i + 2**63) % 2**64 - 2**63  # the seed after the largest is the smallest
    return msgspec.structs.replace(params, seed=wrapped)
