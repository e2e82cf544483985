"""The soak's clients: each sends request after request until told to stop, and holds every answer against the truth.

Comes in: requests and their answers alone on the server. Goes out: a `Tally`. Must not know: processes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak.requests import MALFORMED

#: Nothing takes so long here: whoever waits longer hangs.
HANG_SECONDS = 120.0
DISCONNECTS, BROKEN = 0.2, 0.05


@dataclass
class Tally:
    """What happened, and whatever should not have (`wrong`, at most a few of a kind are worth reading)."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def essence(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What of an answer must not depend on others."""
    return [(c["text"], c["finish_reason"], c["stop_reason"], json.dumps(c["logprobs"])) for c in choices]


async def solo(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The answer to a request that is alone on the server."""
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return essence(response.json()["choices"])


class SoakClient:
    """One client; `run` until `stop` is set."""

    def __init__(self, http: httpx.AsyncClient, truth: list[tuple[dict[str, Any], list[tuple[Any, ...]]]], seed: int):
        self._http = http
        self._truth = truth
        self._rng = random.Random(seed)

    async def run(self, stop: asyncio.Event, tally: Tally) -> None:
        """Sends until told to stop."""
        while not stop.is_set():
            kind = "broken" if self._rng.random() < BROKEN else self._rng.choice(("stream", "whole"))
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    await getattr(self, f"_{kind}")(tally)
            except TimeoutError:
                tally.wrong.append(f"{kind}: no end within {HANG_SECONDS:g} s")
            except httpx.HTTPError as error:
                tally.wrong.append(f"{kind}: {error!r}")

    async def _broken(self, tally: Tally) -> None:
        content, statuses = self._rng.choice(MALFORMED)
        headers = {"Content-Type": "application/json"}
        response = await self._http.post("/v1/completions", content=content, headers=headers)
        tally.counts["malformed"] += 1
        if response.status_code not in statuses:
            tally.wrong.append(f"{content[:60]!r} was answered {response.status_code}")

    async def _whole(self, tally: Tally) -> None:
        body, answer = self._rng.choice(self._truth)
        if self._rng.random() < DISCONNECTS:
            try:
                await self._http.post("/v1/completions", json=body, timeout=self._rng.uniform(0.001, 0.3))
            except httpx.TimeoutException:
                tally.counts["disconnected"] += 1
            return
        response = await self._http.post("/v1/completions", json=body)
        if response.status_code != 200:
            tally.wrong.append(f"{response.status_code}: {response.text[:200]}")
            return
        self._compare(tally, body, essence(response.json()["choices"]), answer)

    async def _stream(self, tally: Tally) -> None:
        body, answer = self._rng.choice(self._truth)
        leave_after = self._rng.randint(0, 10) if self._rng.random() < DISCONNECTS else None
        texts = [""] * len(answer)
        reasons: list[tuple[Any, Any]] = [(None, None)] * len(answer)
        async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if leave_after == 0:
                    tally.counts["disconnected"] += 1
                    return
                if not line.startswith("data: {"):
                    continue
                leave_after = None if leave_after is None else leave_after - 1
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    tally.wrong.append(f"stream: {chunk['error']}")
                    return
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
                    if choice["finish_reason"] is not None:
                        reasons[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
        found = [(text, *reason) for text, reason in zip(texts, reasons, strict=True)]
        self._compare(tally, body, found, [choice[:3] for choice in answer])

    @staticmethod
    def _compare(tally: Tally, body: dict[str, Any], found: list[Any], wanted: list[Any]) -> None:
        tally.counts["compared"] += 1
        if found != wanted:
            tally.wrong.append(f"{body}: {found} instead of {wanted}")
