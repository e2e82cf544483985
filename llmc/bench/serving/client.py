"""One streamed request, and when each piece of its answer came.

Comes in: an `Ask`, a `Target`. Goes out: `Measured`, errors of the network in it. Must not know: other requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from llmc.bench.serving.workload import Ask


@dataclass(frozen=True)
class Target:
    """Where requests go. `chat`: as messages to /v1/chat/completions instead of text to /v1/completions."""

    base_url: str
    model: str | None
    chat: bool = False
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """The path."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request's JSON."""
        prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if self.chat else {"prompt": ask.prompt}
        body = {**prompt, "max_tokens": ask.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.extra}


@dataclass
class Measured:
    """Seconds: `start` after the run's, the others after the request's start. Tokens are what the server counted."""

    start: float
    ttft: float | None = None
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


async def send(client: httpx.AsyncClient, target: Target, ask: Ask, origin: float) -> Measured:
    """Sends the request and reads its stream to the end. `origin`: the run's start, by time.perf_counter."""
    began = last = time.perf_counter()
    found = Measured(began - origin)
    finished = False
    try:
        async with client.stream("POST", target.base_url + target.endpoint, json=target.body(ask)) as response:
            if response.status_code != 200:
                found.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                return found
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    finished = True
                    continue
                now = time.perf_counter()
                if _take(found, msgspec.json.decode(data)):
                    if found.ttft is None:
                        found.ttft = now - began
                    else:
                        found.itl.append(now - last)
                    last = now
                    found.latency = now - began
    except (httpx.HTTPError, httpx.StreamError, msgspec.DecodeError) as error:
        found.error = f"{type(error).__name__}: {error}"
        return found
    if not found.error and not finished:
        found.error = "the stream ended before [DONE]"
    elif not found.error and found.ttft is None:
        found.error = "the answer is empty"
    return found


def _take(found: Measured, chunk: dict[str, Any]) -> bool:
    """Takes a chunk; True if it brought text."""
    if error := chunk.get("error"):
        found.error = str(error.get("message") if isinstance(error, dict) else error)
    if usage := chunk.get("usage"):
        found.input_tokens, found.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    text = ""
    for choice in chunk.get("choices") or ():
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    found.text += text
    return bool(text)
