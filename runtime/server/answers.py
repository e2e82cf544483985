"""From a group of sequences to a response: whole, or as server-sent events; cancelled when the client goes.

Comes in: `Group`s. Goes out: collected answers, or bytes of a stream. Must not know: which endpoint it is.

Chunks are assembled from bytes that were encoded once per stream; per chunk only text and log-probabilities are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.front import Group
from llmc.runtime.sequence import Delta, TokenEntry
from llmc.runtime.server.errors import ApiError, ClientGone, error_json

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class CachedTokens(msgspec.Struct):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts. A prompt counts once however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_of(group: Group, n: int) -> Usage:
    """The counts of a group in which each prompt has `n` consecutive sequences."""
    prompt = sum(s.prompt_tokens for s in group.sequences[::n])
    completion = sum(s.completion_tokens for s in group.sequences)
    cached = sum(s.cached_tokens for s in group.sequences[::n])
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


@dataclass
class Collected:
    """One whole answer."""

    parts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    last: Delta = field(default_factory=Delta)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(group: Group, receive: Receive) -> list[Collected]:
    """Waits for all answers; raises ApiError when generation fails, ClientGone when nobody waits for them any more."""
    found = [Collected() for _ in group.sequences]
    watch = asyncio.create_task(_disconnected(receive))
    watch.add_done_callback(lambda _: group.cancel())
    try:
        with group:
            async for index, delta in group:
                answer = found[index]
                answer.parts.append(delta.text)
                answer.entries += delta.entries
                answer.last = delta
                if failed := failure(delta):
                    raise failed
            if group.cancelled:
                raise ClientGone
    finally:
        watch.cancel()
    return found


def failure(delta: Delta) -> ApiError | None:
    """The error of a delta that ends its answer badly: 429 for one that was turned away, 500 for one that broke off."""
    if delta.finish_reason != "error":
        return None
    if delta.cause is not None:
        return ApiError(429, f"{delta.error}", code=delta.cause, retry_after=delta.retry_after)
    return ApiError(500, f"generation failed: {delta.error}", code="generation_failed")


class Chunks:
    """Encodes one stream's chunks: `head` and `tail` never change within it."""

    def __init__(self, base: dict[str, Any], include_usage: bool) -> None:
        self._open = b"data: " + _encode(base)[:-1]
        self._middle = self._open + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self.include_usage = include_usage

    def chunk(self, index: int, payload: bytes, logprobs: bytes, delta: Delta | None) -> bytes:
        """One choice. `payload` is its text or delta member, as JSON; `delta` gives the reasons if it is the last."""
        if delta is None or delta.finish_reason is None:
            end = b',"finish_reason":null'
        else:
            reasons = _encode(delta.finish_reason), _encode(delta.stop_reason)
            end = b',"finish_reason":%b,"stop_reason":%b' % reasons
        return b'%b%d,%b,"logprobs":%b%b%b' % (self._middle, index, payload, logprobs, end, self._tail)

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that carries the counts."""
        return self._open + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"


class EventStream(Response):
    """Sends server-sent events until they end or the client goes, which cancels the group.

    The status is sent with the first event: what fails before it is answered with a status of its own.
    """

    def __init__(self, group: Group, events: AsyncIterator[bytes]) -> None:
        super().__init__(status_code=200, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._group = group
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        watch = asyncio.create_task(_disconnected(receive))
        watch.add_done_callback(lambda _: self._group.cancel())
        try:
            with self._group:
                event = await anext(self._events, b"")
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.cancel()


async def events(
    group: Group, n: int, chunks: Chunks, first: list[bytes], render: Callable[[int, Delta], bytes]
) -> AsyncIterator[bytes]:
    """The stream of a group: `first`, then what `render` makes of each delta, then usage and [DONE], or an error.

    Nothing comes before the first delta; if that is an error already, it is raised as ApiError.
    """
    begun = False
    async for index, delta in group:
        if failed := failure(delta):
            if not begun:
                raise failed
            yield b"data: " + error_json(failed.body) + b"\n\n"
            return
        if not begun:
            begun = True
            if first:
                yield b"".join(first)
        if delta.text or delta.entries or delta.finish_reason is not None:
            yield render(index, delta)
    if group.cancelled:
        return
    yield chunks.usage(usage_of(group, n)) + DONE if chunks.include_usage else DONE
