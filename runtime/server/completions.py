"""POST /v1/completions: prompts as text or token ids, one or many, `n` answers each."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from llmc.runtime.params import RequestError
from llmc.runtime.sequence import Delta, TokenEntry
from llmc.runtime.server.answers import Chunks, EventStream, Usage, collect, events, usage_of
from llmc.runtime.server.body import JsonRoute
from llmc.runtime.server.context import MAX_SEQUENCES, THREAD_CHARS, of, tenant_of
from llmc.runtime.server.protocol import CompletionRequest
from llmc.runtime.server.submit import submit
from llmc.runtime.text import Tokenizer

router = APIRouter(route_class=JsonRoute)
_encode = msgspec.json.Encoder().encode
_LOWEST = -9999.0  # JSON has no minus infinity


class CompletionLogprobs(msgspec.Struct):
    """Per shown token; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Completion(msgspec.Struct):
    """The response body."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is no whole character as OpenAI writes it: `bytes:\\xe2\\x82`."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def logprobs_of(tokenizer: Tokenizer, entries: list[TokenEntry], offset: int) -> CompletionLogprobs:
    """The log-probabilities of shown tokens; `offset` is the length of the echoed prompt."""
    top = []
    for entry in entries:
        best = {token_name(tokenizer, t.token): max(t.logprob, _LOWEST) for t in entry.top}
        best.setdefault(token_name(tokenizer, entry.token), max(entry.logprob, _LOWEST))
        top.append(best)
    return CompletionLogprobs(
        [token_name(tokenizer, e.token) for e in entries],
        [max(e.logprob, _LOWEST) for e in entries],
        top,
        [offset + e.offset for e in entries],
    )


async def _encode_prompt(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if prompt == "":
        raise RequestError("prompt is empty; it needs at least one character", "prompt")
    if len(prompt) > THREAD_CHARS:
        return await asyncio.to_thread(tokenizer.encode, prompt)
    return tokenizer.encode(prompt)


@router.post("/v1/completions", summary="Complete one or several prompts")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """See CompletionRequest; unsupported parameters are refused."""
    context = of(request)
    service = context.admit(body.model)
    tokenizer = service.text.tokenizer
    prompts = body.prompts()
    if not prompts:
        raise RequestError("prompt is an empty list; at least one prompt is needed", "prompt")
    if len(prompts) * body.n > MAX_SEQUENCES:
        raise RequestError(f"{len(prompts)} prompts times n {body.n}: at most {MAX_SEQUENCES} answers a request", "n")
    params = service.text.params(body.sampling())
    ids = [await _encode_prompt(tokenizer, prompt) for prompt in prompts]
    echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else [""] * len(prompts)
    group = request.state.group = submit(service, ids, params, body.n, "prompt", body.handling(tenant_of(request)))
    identity: dict[str, Any] = {
        "id": f"cmpl-{group.id}",
        "created": context.now(),
        "model": context.model,
        "system_fingerprint": context.fingerprint,
    }
    if body.stream:
        chunks = Chunks({"object": "text_completion", **identity}, body.include_usage)
        return EventStream(group, events(group, body.n, chunks, *_renderer(chunks, tokenizer, body, echoes)))
    choices = []
    for index, answer in enumerate(await collect(group, request.receive)):
        echo = echoes[index // body.n]
        shown = None if body.logprobs is None else logprobs_of(tokenizer, answer.entries, len(echo))
        last = answer.last
        choices.append(CompletionChoice(index, echo + answer.text, shown, last.finish_reason, last.stop_reason))
    done = Completion(**identity, choices=choices, usage=usage_of(group, body.n))
    return Response(_encode(done), media_type="application/json")


def _renderer(
    chunks: Chunks, tokenizer: Tokenizer, body: CompletionRequest, echoes: list[str]
) -> tuple[list[bytes], Any]:
    def render(index: int, delta: Delta) -> bytes:
        shown = b"null"
        if body.logprobs is not None:
            shown = _encode(logprobs_of(tokenizer, delta.entries, 0))
        return chunks.chunk(index, b'"text":' + _encode(delta.text), shown, delta)

    first = []
    if body.echo:
        for index in range(len(echoes) * body.n):
            first.append(chunks.chunk(index, b'"text":' + _encode(echoes[index // body.n]), b"null", None))
    return first, render
