"""A run: every request of a workload at its time, at most so many at once; what they measured, as `vllm bench serve`.

Comes in: `Workload`, `Target`. Goes out: a result as JSON. Must not know: how it is shown.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx
import numpy as np

from llmc.artifacts.errors import EnvironmentFault
from llmc.bench.serving.client import Measured, Target, send
from llmc.bench.serving.workload import Ask, Workload, asks
from llmc.runtime.server.slo import Slo

PERCENTILES = (50, 90, 95, 99)


async def measure(
    workload: Workload,
    target: Target,
    *,
    max_concurrency: int | None,
    timeout: float,
    headers: dict[str, str],
    num_warmups: int = 1,
) -> tuple[list[Measured], float]:
    """What each request measured, and the seconds from the first one's start to the last one's end.

    Raises EnvironmentFault where a request before the run, to warm up, gets no answer.
    """
    wanted = asks(workload)
    seats = asyncio.Semaphore(max_concurrency or len(wanted))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers, trust_env=False) as client:
        for _ in range(num_warmups):
            warm = await send(client, target, Ask(0, "time", 2), time.perf_counter())
            if warm.error:
                raise EnvironmentFault(f"{target.base_url}{target.endpoint}: {warm.error}")
        origin = time.perf_counter()

        async def one(ask: Ask) -> Measured:
            await asyncio.sleep(max(origin + ask.at - time.perf_counter(), 0))
            async with seats:
                return await send(client, target, ask, origin)

        found = await asyncio.gather(*map(one, wanted))
        return list(found), time.perf_counter() - origin


def result(
    workload: Workload,
    target: Target,
    measured: Sequence[Measured],
    seconds: float,
    *,
    max_concurrency: int | None,
    label: str | None,
    slo: Slo | None,
    detailed: bool = False,
) -> dict[str, Any]:
    """The run as JSON, with the keys that `vllm bench serve` writes. Latencies are of requests that succeeded."""
    good = [m for m in measured if not m.error]
    outputs = sum(m.output_tokens for m in good)
    inputs = sum(m.input_tokens for m in good)
    rate = workload.request_rate
    found: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if target.chat else "openai",
        "endpoint_type": "openai-chat" if target.chat else "openai",
        "label": label,
        "model_id": target.model,
        "num_prompts": workload.num_prompts,
        "request_rate": "inf" if np.isinf(rate) else rate,
        "burstiness": workload.burstiness,
        "max_concurrency": max_concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(measured) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if slo is None else sum(not _missed(m, slo) for m in good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": _most_at_once(good),
    }
    for name, values in (
        ("ttft", [m.ttft for m in good if m.ttft is not None]),
        ("tpot", [tpot for m in good if (tpot := m.tpot) is not None]),
        ("itl", [gap for m in good for gap in m.itl]),
        ("e2el", [m.latency for m in good]),
    ):
        found |= _spread(name, values)
    if detailed:
        found |= {
            "input_lens": [m.input_tokens for m in measured],
            "output_lens": [m.output_tokens for m in measured],
            "ttfts": [m.ttft or 0.0 for m in measured],
            "itls": [m.itl for m in measured],
            "start_times": [m.start for m in measured],
            "generated_texts": [m.text for m in measured],
            "errors": [m.error for m in measured],
        }
    return found


def _missed(measured: Measured, slo: Slo) -> list[str]:
    return slo.missed({"ttft": measured.ttft, "tpot": measured.tpot, "e2el": measured.latency})


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles, in milliseconds; 0 of nothing, as vLLM has it."""
    ms = [1000 * value for value in seconds] or [0.0]
    found = {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
    }
    return found | {f"p{p}_{name}_ms": float(np.percentile(ms, p)) for p in PERCENTILES}


def _most_at_once(measured: Sequence[Measured]) -> int:
    changes = sorted([(m.start, 1) for m in measured] + [(m.start + m.latency, -1) for m in measured])
    return int(max(np.cumsum([change for _, change in changes]), default=0))
